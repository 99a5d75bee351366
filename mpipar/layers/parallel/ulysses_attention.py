"""Ulysses attention: an exchange that gives each rank all tokens of some heads.

Each rank holds some tokens of all heads. An all-to-all gives it all tokens of H/q of the heads, so
that attention is whole there, and a second all-to-all takes the result back. This requires that q
divide the number of query heads and of key heads. Each rank holds one contiguous run of tokens,
since every rank computes the whole triangle of its heads. Source: Jacobs et al., arXiv 2309.14509.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size, chunk_slice, consecutive_slices
from mpipar.comm.group import Comm
from mpipar.layers.parallel.local_attention import LocalAttention, Saved
from mpipar.layers.stash import Batch
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, ThreeArrays


class UlyssesAttention(LocalAttention):
    """Attention over all tokens of some heads, between two exchanges. whole: computes it."""

    def __init__(
        self, ops: Ops, comm: Comm, name: str, whole: type[LocalAttention] = LocalAttention
    ) -> None:
        super().__init__(ops, comm, name)
        self.whole = whole(ops, comm, name)

    def forward(self, q: Array, k: Array, v: Array, batch: Batch) -> tuple[Array, Saved]:
        """Return y (B, n, H, d). Comm: two all_to_alls, of q, k and v together, and of y."""
        own = self.ops.empty(q.shape, q.dtype)
        q_whole, k_whole, v_whole = self._all_tokens((q, k, v))
        y, saved = self.whole.forward(q_whole, k_whole, v_whole, batch)
        self._own_tokens((y,), (own,))
        return own, saved

    def backward_input(self, dy: Array, saved: Saved, batch: Batch, out: ThreeArrays) -> None:
        """Write dq, dk, dv. Comm: two all_to_alls, of dy, and of dq, dk and dv together."""
        (dy,) = self._all_tokens((dy,))
        dq, dk, dv = (self.ops.empty(x.shape, x.dtype) for x in saved[:3])
        self.whole.backward_input(dy, saved, batch, (dq, dk, dv))
        self._own_tokens((dq, dk, dv), out)

    def _all_tokens(self, arrays: Saved) -> Saved:
        """Return views (B, T, H/q, d) of arrays (B, n, H, d): all tokens of this rank's heads.

        Comm: one all_to_all.
        """
        ops, comm = self.ops, self.comm
        heads = consecutive_slices([chunk_size(x.shape[2], comm.size) for x in arrays])
        rows, tokens, _, width = arrays[0].shape
        shape = comm.size, rows, tokens, heads[-1].stop, width
        parts = ops.empty(shape, arrays[0].dtype, label="buffers")
        for group_rank in range(comm.size):
            for inside, x in zip(heads, arrays, strict=True):
                ops.copy(
                    parts[group_rank][:, :, inside],
                    x[:, :, chunk_slice(x.shape[2], comm.size, group_rank)],
                )
        received = comm.all_to_all(parts, self.name)
        whole = ops.empty((rows, comm.size * tokens, heads[-1].stop, width), arrays[0].dtype)
        for group_rank in range(comm.size):
            ops.copy(
                whole[:, chunk_slice(whole.shape[1], comm.size, group_rank)], received[group_rank]
            )
        return tuple(whole[:, :, inside] for inside in heads)

    def _own_tokens(self, arrays: Saved, out: Saved) -> None:
        """Write to `out` (B, n, H, d) this rank's tokens, with all heads, of arrays (B, T, H/q, d).

        Comm: one all_to_all.
        """
        ops, comm = self.ops, self.comm
        heads = consecutive_slices([x.shape[2] for x in arrays])
        rows, tokens, _, width = out[0].shape
        shape = comm.size, rows, tokens, heads[-1].stop, width
        parts = ops.empty(shape, arrays[0].dtype, label="buffers")
        for group_rank in range(comm.size):
            for inside, x in zip(heads, arrays, strict=True):
                ops.copy(
                    parts[group_rank][:, :, inside],
                    x[:, chunk_slice(x.shape[1], comm.size, group_rank)],
                )
        received = comm.all_to_all(parts, self.name)
        for group_rank in range(comm.size):
            for inside, x in zip(heads, out, strict=True):
                ops.copy(
                    x[:, :, chunk_slice(x.shape[2], comm.size, group_rank)],
                    received[group_rank][:, :, inside],
                )
