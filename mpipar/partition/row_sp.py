"""The row cut with tokens cut between the products: y (B, T/q, N) of x (B, T, K/q).

In the forward pass, a reduce-scatter sums over the ranks and leaves each with its own tokens of y.
The backward pass gathers dy once, for both gradients. chunks.py covers the case that q does not
divide T.
"""

from __future__ import annotations

from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.partition import tokens as held
from mpipar.partition.contracts import Product, Sizes

shard_axis = 0
bias_is_cut = False
tokens_are_cut = True
barriers = (("F", "reduce_scatter", "y"), ("I", "all_gather", "y"))


def forward(
    product: Product, ops: Ops, x: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> Array:
    """Return y (B, T/q, N), summed over all ranks' channels. Comm: one reduce_scatter of y."""
    return held.scatter(ops, product.matmul(x, w), comm, name)


def backward_input(
    product: Product, ops: Ops, dy: Array, w: Array, comm: Comm, name: str, *, sizes: Sizes
) -> tuple[Array, Array]:
    """Return dx (B, T, K/q) of dy (B, T/q, N), and dy of all tokens. Comm: one all_gather of dy."""
    dy = held.gather(ops, dy, sizes.tokens, comm, name)
    return product.matmul_nt(dy, w), dy


def backward_weight(
    product: Product, ops: Ops, x: Array, dy: Array, dw: Array, comm: Comm, name: str,
    *, sizes: Sizes,
) -> None:
    """Add x^T dy over all tokens to dw (K/q, N)."""
    product.matmul_tn_add(x, dy, dw)
