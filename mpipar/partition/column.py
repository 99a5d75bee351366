"""Cut by output channels; the outputs stay where they are: y (.., N/q) = x (.., K) @ w (K, N/q).

Every rank reads all of x and computes its own columns of y, so the forward pass needs no barrier.
In the backward pass, each rank's dx = dy @ w^T covers only its columns of the sum over N, and one
all-reduce adds up these partial sums.
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
    """Return y (.., N/q) of x (.., K)."""
    return product.matmul(x, w)


def backward_input(
    product: Product, ops: Ops, dy: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> tuple[Array, Array]:
    """Return dx (.., K), summed over the columns of all ranks. Comm: one all_reduce of dx."""
    return comm.all_reduce(product.matmul_nt(dy, w), name), dy


def backward_weight(
    product: Product, ops: Ops, x: Array, dy: Array, dw: Array, comm: Comm, name: str,
    *, sizes: Sizes,
) -> None:
    """Add x^T dy to dw (K, N/q)."""
    product.matmul_tn_add(x, dy, dw)
