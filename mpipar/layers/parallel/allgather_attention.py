"""All-gather attention: every rank collects all keys and values, and attends with its own queries.

It has one barrier where the ring has many messages, but briefly needs memory for all keys and
values of a layer. They are gathered again for the backward pass. Source: Dubey et al., arXiv
2407.21783, section 3.3.2.
"""

from __future__ import annotations

from mpipar.comm.grid import held_and_whole
from mpipar.layers.parallel.chunks import packed, rounded
from mpipar.layers.parallel.local_attention import LocalAttention, Saved, whole_positions
from mpipar.layers.stash import Batch
from mpipar.ops.signature import Array, ThreeArrays


class AllGatherAttention(LocalAttention):
    """Every rank attends with its own queries to the keys and values of all ranks."""

    def forward(self, q: Array, k: Array, v: Array, batch: Batch) -> tuple[Array, Saved]:
        """Return y (B, n, H, d). Comm: one all_gather of k and v together."""
        keys, values = self._gathered(k, v, batch)
        y, stats = self.ops.attention_block_forward(
            q, keys, values, batch.positions, whole_positions(batch)
        )
        y = rounded(self.ops, y, q.dtype)
        return y, (q, k, v, y, stats)

    def backward_input(self, dy: Array, saved: Saved, batch: Batch, out: ThreeArrays) -> None:
        """Write dq, dk, dv. The sums of dk and dv are float32 even with 16-bit activations.

        Comm: one all_gather of k and v, one reduce_scatter of dk and dv.
        """
        ops, comm, (q, k, v, y, stats) = self.ops, self.comm, saved
        keys, values = self._gathered(k, v, batch)
        dq, *whole = ops.attention_block_backward(
            dy,
            q,
            keys,
            values,
            stats,
            ops.attention_delta(dy, y),
            q_pos=batch.positions,
            k_pos=whole_positions(batch),
        )
        parts = ops.empty((comm.size, 2, *k.shape), whole[0].dtype, label="buffers")
        for group_rank in range(comm.size):
            for which, gradient in enumerate(whole):
                for held, there in held_and_whole(
                    gradient.shape[1], "gather", comm.size, group_rank
                ):
                    ops.copy(parts[group_rank][which][:, held], gradient[:, there])
        dkv = comm.reduce_scatter(parts, self.name)
        for to, gradient in zip(out, (dq, dkv[0], dkv[1]), strict=True):
            ops.copy(to, gradient)

    def _gathered(self, k: Array, v: Array, batch: Batch) -> tuple[Array, Array]:
        """Return (k, v) of all tokens, in the order of the row. Comm: one all_gather."""
        ops, size = self.ops, self.comm.size
        parts = self.comm.all_gather(packed(ops, k, v), self.name)  # (size, 2, B, n, Hkv, d)
        rows, _, *head = k.shape
        tokens = len(whole_positions(batch))
        whole = ops.empty((2, rows, tokens, *head), k.dtype, label="buffers")
        for group_rank in range(size):
            for held, there in held_and_whole(tokens, "gather", size, group_rank):
                ops.copy(whole[:, :, there], parts[group_rank][:, :, held])
        return whole[0], whole[1]
