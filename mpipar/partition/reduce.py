"""Cut by input channels, each layer alone: y (.., N) = sum over ranks of x (.., K/q) @ w (K/q, N).

This is the mirror image of the `gather` cut: x is whole on every rank, and each rank multiplies its
own channels of it. In the forward pass one all-reduce adds up the products; in the backward pass
each rank computes only its own channels of dx, and one all-gather joins them. The gradients are the
same. This cut is here for comparison.
"""

from __future__ import annotations

from mpipar.ops.signature import Array
from mpipar.partition import chunks, row
from mpipar.partition.contracts import Here

shard_axis = 0
bias_is_cut = False
tokens_are_cut = False


def forward(here: Here, x: Array, w: Array) -> Array:
    """Return y (.., N), summed over all ranks' channels of x (.., K). Comm: one all_reduce of y."""
    return row.forward(here, chunks.local_chunk(here.ops, x, -1, here.comm), w)


def backward_input(here: Here, dy: Array, w: Array) -> tuple[Array, Array]:
    """Return dx (.., K) of dy (.., N). Comm: one all_gather of dx."""
    pieces = here.comm.all_gather(here.ops.matmul_nt(dy, w), here.name)  # (q, .., K/q)
    return chunks.join(here.ops, pieces, -1, here.sizes.inner), dy


def backward_weight(here: Here, x: Array, dy: Array, dw: Array) -> None:
    """Add (own channels of x)^T dy to dw (K/q, N)."""
    here.ops.matmul_tn_add(chunks.local_chunk(here.ops, x, -1, here.comm), dy, dw)
