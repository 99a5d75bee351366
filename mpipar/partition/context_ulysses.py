"""Ulysses attention: an exchange that gives each rank all tokens of some heads.

Each rank holds some tokens of all heads. An all-to-all gives it all tokens of H/q of the heads, so
that attention is whole there, and a second all-to-all takes the result back. This requires that q
divide the number of query heads and of key heads. Each rank holds one contiguous run of tokens,
since every rank computes the whole triangle of its heads. Source: Jacobs et al., arXiv 2309.14509.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size, chunk_slice, consecutive_slices
from mpipar.ops.signature import Array
from mpipar.partition.contracts import Attending, ContextCut, Out, Saved


class Ulysses:
    """The two functions, wrapped around those of `whole`, for a rank that holds all tokens."""

    def __init__(self, whole: ContextCut) -> None:
        self.whole = whole

    def forward(self, here: Attending, q: Array, k: Array, v: Array) -> tuple[Array, Saved]:
        """Return y (B, n, H, d). Comm: two all_to_alls, of q, k and v together, and of y."""
        own = here.ops.empty(q.shape, q.dtype)
        y, saved = self.whole.forward(here, *_all_tokens(here, (q, k, v)))
        _own_tokens(here, (y,), (own,))
        return own, saved

    def backward_input(self, here: Attending, dy: Array, saved: Saved, out: Out) -> None:
        """Write dq, dk, dv. Comm: two all_to_alls, of dy, and of dq, dk and dv together."""
        (dy,) = _all_tokens(here, (dy,))
        whole = tuple(here.ops.empty(x.shape, x.dtype) for x in saved[:3])
        self.whole.backward_input(here, dy, saved, whole)
        _own_tokens(here, whole, out)


def _all_tokens(here: Attending, arrays: Saved) -> Saved:
    """Return views (B, T, H/q, d) of arrays (B, n, H, d): all tokens of this rank's heads.

    Comm: one all_to_all.
    """
    ops, comm = here.ops, here.comm
    heads = consecutive_slices([chunk_size(x.shape[2], comm.size) for x in arrays])
    rows, tokens, _, width = arrays[0].shape
    shape = comm.size, rows, tokens, heads[-1].stop, width
    parts = ops.empty(shape, arrays[0].dtype, label="buffers")
    for place in range(comm.size):
        for inside, x in zip(heads, arrays, strict=True):
            ops.copy(parts[place][:, :, inside], x[:, :, chunk_slice(x.shape[2], comm.size, place)])
    received = comm.all_to_all(parts, here.name)
    whole = ops.empty((rows, comm.size * tokens, heads[-1].stop, width), arrays[0].dtype)
    for place in range(comm.size):
        ops.copy(whole[:, chunk_slice(whole.shape[1], comm.size, place)], received[place])
    return tuple(whole[:, :, inside] for inside in heads)


def _own_tokens(here: Attending, arrays: Saved, out: Saved) -> None:
    """Write to `out` (B, n, H, d) this rank's tokens, with all heads, of arrays (B, T, H/q, d).

    Comm: one all_to_all.
    """
    ops, comm = here.ops, here.comm
    heads = consecutive_slices([x.shape[2] for x in arrays])
    rows, tokens, _, width = out[0].shape
    shape = comm.size, rows, tokens, heads[-1].stop, width
    parts = ops.empty(shape, arrays[0].dtype, label="buffers")
    for place in range(comm.size):
        for inside, x in zip(heads, arrays, strict=True):
            ops.copy(parts[place][:, :, inside], x[:, chunk_slice(x.shape[1], comm.size, place)])
    received = comm.all_to_all(parts, here.name)
    for place in range(comm.size):
        for inside, x in zip(heads, out, strict=True):
            ops.copy(
                x[:, :, chunk_slice(x.shape[2], comm.size, place)], received[place][:, :, inside]
            )
