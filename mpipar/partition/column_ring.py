"""The cut column_sp with its all-gathers and its reduce-scatter sent in pieces: see ring.py.

While this rank multiplies the tokens of one rank, those of the next are on their way. Only the
weight gradient first collects all of them.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size, chunk_slice
from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.partition import chunks, ring
from mpipar.partition.contracts import Product, Sizes

shard_axis = 1
bias_is_cut = True
tokens_are_cut = True
barriers = (("F", "ring", "x"), ("I", "ring", "x"), ("W", "ring", "x"))


def forward(
    product: Product, ops: Ops, x: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> Array:
    """Return y (B, T, N/q) of x (B, T/q, K). Comm: one ring of x."""
    y = ops.empty((x.shape[0], sizes.tokens, w.shape[1]))
    for place, block in ring.pieces(ops, x, comm, name):
        own = y[:, chunk_slice(sizes.tokens, comm.size, place)]
        ops.copy(own, product.matmul(block[:, :own.shape[1]], w))
    return y


def backward_input(
    product: Product, ops: Ops, dy: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> tuple[Array, Array]:
    """Return dx (B, T/q, K), summed over the columns of all ranks. Comm: one ring of dx."""
    def part(place: int) -> Array:
        dx = product.matmul_nt(dy[:, chunk_slice(sizes.tokens, comm.size, place)], w)
        return chunks.pad(ops, dx, 1, chunk_size(sizes.tokens, comm.size))

    return ring.total(ops, part, comm, name), dy


def backward_weight(
    product: Product, ops: Ops, x: Array, dy: Array, dw: Array, comm: Comm, name: str,
    *, sizes: Sizes,
) -> None:
    """Add x^T dy over all tokens to dw (K, N/q). Comm: one ring of x.

    It is one product at the end because pieces arrive in a different order on each rank, while
    ranks that hold copies of a weight, such as shared key heads, must add up tokens in the same
    order.
    """
    whole = ops.empty((x.shape[0], sizes.tokens, x.shape[2]), x.dtype, label="buffers")
    for place, block in ring.pieces(ops, x, comm, name):
        own = whole[:, chunk_slice(sizes.tokens, comm.size, place)]
        ops.copy(own, block[:, :own.shape[1]])
    product.matmul_tn_add(whole, dy, dw)
