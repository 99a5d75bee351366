"""Cut by input channels: y (.., N) = sum over ranks of x (.., K/q) @ w (K/q, N).

This is the other half of a pair: it reads what a column cut left in place. In the forward pass, one
all-reduce adds up the products. In the backward pass there is no barrier, since dy is whole on
every rank and each rank computes its own channels of dx.
"""

from __future__ import annotations

from mpipar.layers.parallel import tokens
from mpipar.layers.parallel.linear import Linear
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class RowLinear(Linear):
    """y = x @ w + b, whose terms of the sum over K are divided among the ranks."""

    cuts_outputs = False

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (.., N) of x (.., K/q). Comm: one all_reduce of y over tp."""
        stash[self.name, "x"] = x
        y = self.comm.all_reduce(self.ops.matmul(x, self.w), self.name)
        return self._plus_bias(y)  # once, after the sum

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (.., K/q) of dy (.., N)."""
        stash[self.name, "dy"] = dy
        return self.ops.matmul_nt(dy, self.w)

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T dy to dw (K/q, N), and the sum of dy to db (N,), the same on every rank."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        self.ops.matmul_tn_add_sums(x, dy, self.dw, self.db)


class RowSequenceLinear(RowLinear):
    """`RowLinear` whose result is divided among the ranks by tokens: y (B, T/q, N).

    A reduce-scatter sums y and leaves each rank with its own tokens. The backward pass gathers dy
    once, for both gradients. chunks.py covers the case that q does not divide T.
    """

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T/q, N) of x (B, T, K/q). Comm: one reduce_scatter of y over tp."""
        stash[self.name, "x"] = x
        y = tokens.scatter(self.ops, self.ops.matmul(x, self.w), self.comm, self.name)
        return self._plus_bias(y)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, K/q) of dy (B, T/q, N). Comm: one all_gather of dy over tp."""
        dy = tokens.gather(self.ops, dy, stash.batch.shape[1], self.comm, self.name)  # (B, T, N)
        stash[self.name, "dy"] = dy
        return self.ops.matmul_nt(dy, self.w)
