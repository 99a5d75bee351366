"""Cut by output channels, with the outputs gathered: the textbook picture of a partitioned layer.

y (.., N) = all-gather of x (.., K) @ w (K, N/q). Each layer stands alone, with a whole input and a
whole output, so every product takes an all-gather forward and an all-reduce backward, whereas the
column and row cuts take one all-reduce each way for a *pair* of products. The gradients are the
same. This cut is here for comparison.
"""

from __future__ import annotations

from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.partition import chunks
from mpipar.partition.contracts import Product, Sizes

shard_axis = 1
bias_is_cut = False
tokens_are_cut = False
barriers = (("F", "all_gather", "y"), ("I", "all_reduce", "x"))


def forward(
    product: Product, ops: Ops, x: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> Array:
    """Return y (.., N) of x (.., K). Comm: one all_gather of y."""
    pieces = comm.all_gather(product.matmul(x, w), name)  # (q, .., N/q)
    return chunks.join(ops, pieces, -1, sizes.outer)


def backward_input(
    product: Product, ops: Ops, dy: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> tuple[Array, Array]:
    """Return dx (.., K), summed over all ranks' columns of dy. Comm: one all_reduce of dx."""
    dx = product.matmul_nt(chunks.local_chunk(ops, dy, -1, comm), w)
    return comm.all_reduce(dx, name), dy


def backward_weight(
    product: Product, ops: Ops, x: Array, dy: Array, dw: Array, comm: Comm, name: str,
    *, sizes: Sizes,
) -> None:
    """Add x^T (own columns of dy (.., N)) to dw (K, N/q)."""
    product.matmul_tn_add(x, chunks.local_chunk(ops, dy, -1, comm), dw)
