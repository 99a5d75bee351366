"""The column cut with tokens cut between the products: y (B, T, N/q) of x (B, T/q, K).

The forward pass gathers x and multiplies. In the backward pass, a reduce-scatter of dx replaces the
all-reduce. A rank keeps only its own tokens of x, so the weight gradient gathers x again. chunks.py
covers the case that q does not divide T.
"""

from __future__ import annotations

from mpipar.ops.signature import Array
from mpipar.partition import tokens as held
from mpipar.partition.contracts import Here

shard_axis = 1
bias_is_cut = True
tokens_are_cut = True


def forward(here: Here, x: Array, w: Array) -> Array:
    """Return y (B, T, N/q) of x (B, T/q, K). Comm: one all_gather of x."""
    x = held.gather(here.ops, x, here.sizes.tokens, here.comm, here.name)
    return here.ops.matmul(x, w)


def backward_input(here: Here, dy: Array, w: Array) -> tuple[Array, Array]:
    """Return dx (B, T/q, K), summed over all ranks' columns. Comm: one reduce_scatter of dx."""
    return held.scatter(here.ops, here.ops.matmul_nt(dy, w), here.comm, here.name), dy


def backward_weight(here: Here, x: Array, dy: Array, dw: Array) -> None:
    """Add x^T dy over all tokens to dw (K, N/q). Comm: one all_gather of x."""
    x = held.gather(here.ops, x, here.sizes.tokens, here.comm, here.name)
    here.ops.matmul_tn_add(x, dy, dw)
