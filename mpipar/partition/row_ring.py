"""The cut row_sp with its reduce-scatter and its all-gather sent in pieces: see ring.py.

While the sum of one rank's tokens is on its way, this rank multiplies those of the next.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size, chunk_slice
from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.partition import chunks, ring
from mpipar.partition.contracts import Product, Sizes

shard_axis = 0
bias_is_cut = False
tokens_are_cut = True
barriers = (("F", "ring", "y"), ("I", "ring", "y"))


def forward(
    product: Product, ops: Ops, x: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> Array:
    """Return y (B, T/q, N), summed over all ranks' channels. Comm: one ring of y."""
    def part(place: int) -> Array:
        y = product.matmul(x[:, chunk_slice(sizes.tokens, comm.size, place)], w)
        return chunks.pad(ops, y, 1, chunk_size(sizes.tokens, comm.size))

    return ring.total(ops, part, comm, name)


def backward_input(
    product: Product, ops: Ops, dy: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> tuple[Array, Array]:
    """Return dx (B, T, K/q) of dy (B, T/q, N), and dy of all tokens. Comm: one ring of dy."""
    dx = ops.empty((dy.shape[0], sizes.tokens, w.shape[0]))
    whole = ops.empty((dy.shape[0], sizes.tokens, dy.shape[2]))
    for place, block in ring.pieces(ops, dy, comm, name):
        rows = chunk_slice(sizes.tokens, comm.size, place)
        own = whole[:, rows]
        ops.copy(own, block[:, :own.shape[1]])
        ops.copy(dx[:, rows], product.matmul_nt(own, w))
    return dx, whole


def backward_weight(
    product: Product, ops: Ops, x: Array, dy: Array, dw: Array, comm: Comm, name: str,
    *, sizes: Sizes,
) -> None:
    """Add x^T dy over all tokens to dw (K/q, N)."""
    product.matmul_tn_add(x, dy, dw)
