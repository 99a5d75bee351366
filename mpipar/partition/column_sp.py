"""The column cut with tokens cut between the products: y (B, T, N/q) of x (B, T/q, K).

The forward pass gathers x and multiplies. In the backward pass, a reduce-scatter of dx replaces the
all-reduce. A rank keeps only its own tokens of x, so the weight gradient gathers x again. chunks.py
covers the case that q does not divide T.
"""

from __future__ import annotations

from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.partition import tokens as held
from mpipar.partition.contracts import Product, Sizes

shard_axis = 1
bias_is_cut = True
tokens_are_cut = True
barriers = (("F", "all_gather", "x"), ("I", "reduce_scatter", "x"), ("W", "all_gather", "x"))


def forward(
    product: Product, ops: Ops, x: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> Array:
    """Return y (B, T, N/q) of x (B, T/q, K). Comm: one all_gather of x."""
    return product.matmul(held.gather(ops, x, sizes.tokens, comm, name), w)


def backward_input(
    product: Product, ops: Ops, dy: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> tuple[Array, Array]:
    """Return dx (B, T/q, K), summed over all ranks' columns. Comm: one reduce_scatter of dx."""
    return held.scatter(ops, product.matmul_nt(dy, w), comm, name), dy


def backward_weight(
    product: Product, ops: Ops, x: Array, dy: Array, dw: Array, comm: Comm, name: str,
    *, sizes: Sizes,
) -> None:
    """Add x^T dy over all tokens to dw (K, N/q). Comm: one all_gather of x."""
    product.matmul_tn_add(held.gather(ops, x, sizes.tokens, comm, name), dy, dw)
