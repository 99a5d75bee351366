"""Cut by input channels: y (.., N) = sum over ranks of x (.., K/q) @ w (K/q, N).

This is the other half of a pair: it reads what a column cut left in place. In the forward pass, one
all-reduce adds up the products. In the backward pass there is no barrier, since dy is whole on
every rank and each rank computes its own channels of dx.
"""

from __future__ import annotations

from mpipar.ops.signature import Array
from mpipar.partition.contracts import Here

shard_axis = 0
bias_is_cut = False
tokens_are_cut = False


def forward(here: Here, x: Array, w: Array) -> Array:
    """Return y (.., N), summed over all ranks' channels. Comm: one all_reduce of y."""
    return here.comm.all_reduce(here.ops.matmul(x, w), here.name)


def backward_input(here: Here, dy: Array, w: Array) -> tuple[Array, Array]:
    """Return dx (.., K/q) of dy (.., N)."""
    return here.ops.matmul_nt(dy, w), dy


def backward_weight(here: Here, x: Array, dy: Array, dw: Array) -> None:
    """Add x^T dy to dw (K/q, N)."""
    here.ops.matmul_tn_add(x, dy, dw)
