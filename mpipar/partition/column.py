"""Cut by output channels; the outputs stay where they are: y (.., N/q) = x (.., K) @ w (K, N/q).

Every rank reads all of x and makes its own columns of y, so forward needs no barrier. Backward,
each rank's dx = dy @ w^T is only its columns' part of the sum over N. One all-reduce adds the
parts.
"""

from __future__ import annotations

from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.partition.contracts import Product, Sizes

shard_axis = 1
bias_is_cut = True
tokens_are_cut = False
barriers = (("I", "all_reduce", "x"),)


def forward(
    product: Product, ops: Ops, x: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> Array:
    """y (.., N/q) of x (.., K)."""
    return product.matmul(x, w)


def backward_input(
    product: Product, ops: Ops, dy: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> tuple[Array, Array]:
    """dx (.., K), summed over everybody's columns. Comm: one all_reduce of dx."""
    return comm.all_reduce(product.matmul_nt(dy, w), name), dy


def backward_weight(
    product: Product, ops: Ops, x: Array, dy: Array, dw: Array, comm: Comm, name: str,
    *, sizes: Sizes,
) -> None:
    """dw (K, N/q) += x^T dy."""
    product.matmul_tn_add(x, dy, dw)
