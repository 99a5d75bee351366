"""Cut by input channels: y (.., N) = sum over ranks of x (.., K/q) @ w (K/q, N).

This is the other half of a pair: it reads what a column cut left behind. Forward, one all-reduce
adds the products. Backward, dy is whole on every rank and each rank makes its own channels of dx,
so there is no barrier.
"""

from __future__ import annotations

from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.partition.contracts import Product, Sizes

shard_axis = 0
bias_is_cut = False
tokens_are_cut = False
barriers = (("F", "all_reduce", "y"),)


def forward(
    product: Product, ops: Ops, x: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> Array:
    """y (.., N), summed over everybody's channels. Comm: one all_reduce of y."""
    return comm.all_reduce(product.matmul(x, w), name)


def backward_input(
    product: Product, ops: Ops, dy: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> tuple[Array, Array]:
    """dx (.., K/q) of dy (.., N)."""
    return product.matmul_nt(dy, w), dy


def backward_weight(
    product: Product, ops: Ops, x: Array, dy: Array, dw: Array, comm: Comm, name: str,
    *, sizes: Sizes,
) -> None:
    """dw (K/q, N) += x^T dy."""
    product.matmul_tn_add(x, dy, dw)
