"""Cut by input channels: y (.., N) = sum over ranks of x (.., K/q) @ w (K/q, N).

This is the other half of a pair: it reads what a column cut left in place. In the forward pass, one
all-reduce adds up the products. In the backward pass there is no barrier, since dy is whole on
every rank and each rank computes its own channels of dx.
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
    """Return y (.., N), summed over all ranks' channels. Comm: one all_reduce of y."""
    return comm.all_reduce(product.matmul(x, w), name)


def backward_input(
    product: Product, ops: Ops, dy: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> tuple[Array, Array]:
    """Return dx (.., K/q) of dy (.., N)."""
    return product.matmul_nt(dy, w), dy


def backward_weight(
    product: Product, ops: Ops, x: Array, dy: Array, dw: Array, comm: Comm, name: str,
    *, sizes: Sizes,
) -> None:
    """Add x^T dy to dw (K/q, N)."""
    product.matmul_tn_add(x, dy, dw)
