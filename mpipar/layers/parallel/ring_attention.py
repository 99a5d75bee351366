"""Ring attention: keys and values travel around the ring of ranks, one piece at a time.

A rank attends to its own tokens first, then to each piece that arrives, and merges the partial
results by their softmax sums. Meanwhile the next piece travels.

Each rank holds a piece from the start of the row and one from its end (see `grid.token_pieces`).
All its queries therefore see the first half of an earlier rank's keys, and its second half of
queries sees all of a later rank's keys, which is the same amount of work for every rank in every
step. Sources: Liu et al., arXiv 2310.01889; for the pieces Brandon et al., arXiv 2311.09431, and
Dubey et al., arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size
from mpipar.comm.group import Pending
from mpipar.layers.parallel import ring
from mpipar.layers.parallel.chunks import packed, rounded
from mpipar.layers.parallel.local_attention import LocalAttention, Saved
from mpipar.layers.stash import Batch
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, ThreeArrays

GRADIENTS = ring.TAG + 1  # the tag of dk and dv, which travel beside k and v


class RingAttention(LocalAttention):
    """Every rank attends with its own queries to the keys and values that come by."""

    def forward(self, q: Array, k: Array, v: Array, batch: Batch) -> tuple[Array, Saved]:
        """Return y (B, n, H, d). Comm: one ring of k and v together."""
        ops, comm = self.ops, self.comm
        for group_rank, there in ring.pieces(ops, packed(ops, k, v), comm, self.name):
            queries, keys, where = _seen(ops, batch.positions, group_rank, comm.group_rank)
            part = ops.attention_block_forward(
                q[:, queries], there[0][:, keys], there[1][:, keys], *where
            )
            if group_rank == comm.group_rank:
                y, stats = part
            else:
                ops.attention_merge(y[:, queries], stats[:, :, queries], *part)
        y = rounded(ops, y, q.dtype)
        return y, (q, k, v, y, stats)

    def backward_input(self, dy: Array, saved: Saved, batch: Batch, out: ThreeArrays) -> None:
        """Write dq, dk, dv.

        The sums of dk and dv follow their k and v around the ring while every rank adds its part,
        and the last message brings them home. They are float32 even with 16-bit activations.
        Comm: one ring of k and v. In it, `size` times, one isend of dk and dv to the next rank and
        one irecv from the one before.
        """
        ops, comm, (q, k, v, y, stats) = self.ops, self.comm, saved
        delta = ops.attention_delta(dy, y)
        under_way: list[Pending] = []  # dk and dv that arrive, and those that leave
        for group_rank, there in ring.pieces(ops, packed(ops, k, v), comm, self.name):
            queries, keys, where = _seen(ops, batch.positions, group_rank, comm.group_rank)
            dq_part, *dkv_part = ops.attention_block_backward(
                dy[:, queries],
                q[:, queries],
                there[0][:, keys],
                there[1][:, keys],
                stats[:, :, queries],
                delta[:, :, queries],
                q_pos=where[0],
                k_pos=where[1],
            )
            if not under_way:  # this rank's own piece comes first
                dq, total = dq_part, packed(ops, *dkv_part)
            else:
                ops.accumulate(dq[:, queries], dq_part)
                total, _ = [message.wait() for message in under_way]
                for which, part in enumerate(dkv_part):
                    ops.accumulate(total[which][:, keys], part)
            after = ops.empty(total.shape, total.dtype, label="buffers")
            under_way = [
                comm.irecv(after, comm.neighbor(-1), GRADIENTS, self.name),
                comm.isend(total, comm.neighbor(1), GRADIENTS, self.name),
            ]
        home, _ = [message.wait() for message in under_way]
        for to, gradient in zip(out, (dq, home[0], home[1]), strict=True):
            ops.copy(to, gradient)


def _seen(
    ops: Ops, positions: Array, group_rank: int, own: int
) -> tuple[slice, slice, tuple[Array, Array]]:
    """Return (queries here, keys of group_rank, their positions) between which there is attention.

    All these queries see all keys of another rank, which is expressed by keys at position 0.
    """
    tokens = positions.shape[0]
    half, every = chunk_size(tokens, 2), slice(None)
    if group_rank == own:
        return every, every, (positions, positions)
    queries, keys = (every, slice(0, half)) if group_rank < own else (slice(half, None), every)
    there = ops.zeros((half if group_rank < own else tokens,), positions.dtype, label="buffers")
    return queries, keys, (positions[queries], there)
