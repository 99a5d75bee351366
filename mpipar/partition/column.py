"""Cut by output channels; the outputs stay where they are: y (.., N/q) = x (.., K) @ w (K, N/q).

Every rank reads all of x and computes its own columns of y, so the forward pass needs no barrier.
In the backward pass, each rank's dx = dy @ w^T covers only its columns of the sum over N, and one
all-reduce adds up these partial sums.
"""

from __future__ import annotations

from mpipar.ops.signature import Array
from mpipar.partition.contracts import Here

shard_axis = 1
bias_is_cut = True
tokens_are_cut = False


def forward(here: Here, x: Array, w: Array) -> Array:
    """Return y (.., N/q) of x (.., K)."""
    return here.ops.matmul(x, w)


def backward_input(here: Here, dy: Array, w: Array) -> tuple[Array, Array]:
    """Return dx (.., K), summed over the columns of all ranks. Comm: one all_reduce of dx."""
    return here.comm.all_reduce(here.ops.matmul_nt(dy, w), here.name), dy


def backward_weight(here: Here, x: Array, dy: Array, dw: Array) -> None:
    """Add x^T dy to dw (K, N/q)."""
    here.ops.matmul_tn_add(x, dy, dw)
