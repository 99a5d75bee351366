"""Cut by output channels, with the outputs gathered: the textbook picture of a partitioned layer.

y (.., N) = all-gather of x (.., K) @ w (K, N/q). Each layer stands alone, with a whole input and a
whole output, so every product takes an all-gather forward and an all-reduce backward, whereas the
column and row cuts take one all-reduce each way for a *pair* of products. The gradients are the
same. This cut is here for comparison.
"""

from __future__ import annotations

from mpipar.ops.signature import Array
from mpipar.partition import chunks
from mpipar.partition.contracts import Here

shard_axis = 1
bias_is_cut = False
tokens_are_cut = False


def forward(here: Here, x: Array, w: Array) -> Array:
    """Return y (.., N) of x (.., K). Comm: one all_gather of y."""
    pieces = here.comm.all_gather(here.ops.matmul(x, w), here.name)  # (q, .., N/q)
    return chunks.join(here.ops, pieces, -1, here.sizes.outer)


def backward_input(here: Here, dy: Array, w: Array) -> tuple[Array, Array]:
    """Return dx (.., K), summed over all ranks' columns of dy. Comm: one all_reduce of dx."""
    dx = here.ops.matmul_nt(chunks.local_chunk(here.ops, dy, -1, here.comm), w)
    return here.comm.all_reduce(dx, here.name), dy


def backward_weight(here: Here, x: Array, dy: Array, dw: Array) -> None:
    """Add x^T (own columns of dy (.., N)) to dw (K, N/q)."""
    here.ops.matmul_tn_add(x, chunks.local_chunk(here.ops, dy, -1, here.comm), dw)
