"""The cut column_sp with its all-gathers and its reduce-scatter sent in pieces: see ring.py.

While this rank multiplies the tokens of one rank, those of the next are on their way. Only the
weight gradient first collects all of them.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size, chunk_slice
from mpipar.ops.signature import Array
from mpipar.partition import chunks, ring
from mpipar.partition.contracts import Here

shard_axis = 1
bias_is_cut = True
tokens_are_cut = True


def forward(here: Here, x: Array, w: Array) -> Array:
    """Return y (B, T, N/q) of x (B, T/q, K). Comm: one ring of x."""
    y = here.ops.empty((x.shape[0], here.sizes.tokens, w.shape[1]))
    for place, block in ring.pieces(here.ops, x, here.comm, here.name):
        own = y[:, chunk_slice(here.sizes.tokens, here.comm.size, place)]
        here.ops.copy(own, here.ops.matmul(block[:, : own.shape[1]], w))
    return y


def backward_input(here: Here, dy: Array, w: Array) -> tuple[Array, Array]:
    """Return dx (B, T/q, K), summed over the columns of all ranks. Comm: one ring of dx."""

    def part(place: int) -> Array:
        rows = chunk_slice(here.sizes.tokens, here.comm.size, place)
        dx = here.ops.matmul_nt(dy[:, rows], w)
        return chunks.pad(here.ops, dx, 1, chunk_size(here.sizes.tokens, here.comm.size))

    return ring.total(here.ops, part, here.comm, here.name), dy


def backward_weight(here: Here, x: Array, dy: Array, dw: Array) -> None:
    """Add x^T dy over all tokens to dw (K, N/q). Comm: one ring of x.

    It is one product at the end because pieces arrive in a different order on each rank, while
    ranks that hold copies of a weight, such as shared key heads, must add up tokens in the same
    order.
    """
    whole = here.ops.empty((x.shape[0], here.sizes.tokens, x.shape[2]), x.dtype, label="buffers")
    for place, block in ring.pieces(here.ops, x, here.comm, here.name):
        own = whole[:, chunk_slice(here.sizes.tokens, here.comm.size, place)]
        here.ops.copy(own, block[:, : own.shape[1]])
    here.ops.matmul_tn_add(whole, dy, dw)
