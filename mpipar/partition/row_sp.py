"""The row cut with tokens cut between the products: y (B, T/q, N) of x (B, T, K/q).

In the forward pass, a reduce-scatter sums over the ranks and leaves each with its own tokens of y.
The backward pass gathers dy once, for both gradients. chunks.py covers the case that q does not
divide T.
"""

from __future__ import annotations

from mpipar.ops.signature import Array
from mpipar.partition import tokens as held
from mpipar.partition.contracts import Here

shard_axis = 0
bias_is_cut = False
tokens_are_cut = True


def forward(here: Here, x: Array, w: Array) -> Array:
    """Return y (B, T/q, N), summed over all ranks' channels. Comm: one reduce_scatter of y."""
    return held.scatter(here.ops, here.ops.matmul(x, w), here.comm, here.name)


def backward_input(here: Here, dy: Array, w: Array) -> tuple[Array, Array]:
    """Return dx (B, T, K/q) of dy (B, T/q, N), and dy of all tokens. Comm: one all_gather of dy."""
    dy = held.gather(here.ops, dy, here.sizes.tokens, here.comm, here.name)
    return here.ops.matmul_nt(dy, w), dy


def backward_weight(here: Here, x: Array, dy: Array, dw: Array) -> None:
    """Add x^T dy over all tokens to dw (K/q, N)."""
    here.ops.matmul_tn_add(x, dy, dw)
