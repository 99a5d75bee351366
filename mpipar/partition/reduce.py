"""Cut by input channels, each layer alone: y (.., N) = sum over ranks of x (.., K/q) @ w (K/q, N).

This is the mirror image of the `gather` cut: x is whole on every rank, and each rank multiplies its
own channels of it. In the forward pass one all-reduce adds up the products; in the backward pass
each rank computes only its own channels of dx, and one all-gather joins them. The gradients are the
same. This cut is here for comparison.
"""

from __future__ import annotations

from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.partition import chunks, row
from mpipar.partition.contracts import Product, Sizes

shard_axis = 0
bias_is_cut = False
tokens_are_cut = False
barriers = (("F", "all_reduce", "y"), ("I", "all_gather", "x"))


def forward(
    product: Product, ops: Ops, x: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> Array:
    """Return y (.., N), summed over all ranks' channels of x (.., K). Comm: one all_reduce of y."""
    own = chunks.local_chunk(ops, x, -1, comm)
    return row.forward(product, ops, own, w, comm, name, sizes=sizes)


def backward_input(
    product: Product, ops: Ops, dy: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> tuple[Array, Array]:
    """Return dx (.., K) of dy (.., N). Comm: one all_gather of dx."""
    pieces = comm.all_gather(product.matmul_nt(dy, w), name)  # (q, .., K/q)
    return chunks.join(ops, pieces, -1, sizes.inner), dy


def backward_weight(
    product: Product, ops: Ops, x: Array, dy: Array, dw: Array, comm: Comm, name: str,
    *, sizes: Sizes,
) -> None:
    """Add (own channels of x)^T dy to dw (K/q, N)."""
    product.matmul_tn_add(chunks.local_chunk(ops, x, -1, comm), dy, dw)
