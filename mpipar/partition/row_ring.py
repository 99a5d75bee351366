"""The cut row_sp with its reduce-scatter and its all-gather sent in pieces: see ring.py.

While the sum of one rank's tokens is on its way, this rank multiplies those of the next.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size, chunk_slice
from mpipar.ops.signature import Array
from mpipar.partition import chunks, ring
from mpipar.partition.contracts import Here

shard_axis = 0
bias_is_cut = False
tokens_are_cut = True


def forward(here: Here, x: Array, w: Array) -> Array:
    """Return y (B, T/q, N), summed over all ranks' channels. Comm: one ring of y."""

    def part(place: int) -> Array:
        rows = chunk_slice(here.sizes.tokens, here.comm.size, place)
        y = here.ops.matmul(x[:, rows], w)
        return chunks.pad(here.ops, y, 1, chunk_size(here.sizes.tokens, here.comm.size))

    return ring.total(here.ops, part, here.comm, here.name)


def backward_input(here: Here, dy: Array, w: Array) -> tuple[Array, Array]:
    """Return dx (B, T, K/q) of dy (B, T/q, N), and dy of all tokens. Comm: one ring of dy."""
    dx = here.ops.empty((dy.shape[0], here.sizes.tokens, w.shape[0]))
    whole = here.ops.empty((dy.shape[0], here.sizes.tokens, dy.shape[2]))
    for place, block in ring.pieces(here.ops, dy, here.comm, here.name):
        rows = chunk_slice(here.sizes.tokens, here.comm.size, place)
        own = whole[:, rows]
        here.ops.copy(own, block[:, : own.shape[1]])
        here.ops.copy(dx[:, rows], here.ops.matmul_nt(own, w))
    return dx, whole


def backward_weight(here: Here, x: Array, dy: Array, dw: Array) -> None:
    """Add x^T dy over all tokens to dw (K/q, N)."""
    here.ops.matmul_tn_add(x, dy, dw)
