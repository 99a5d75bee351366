"""Cut by input channels: y (.., N) = sum over ranks of x (.., K/q) @ w (K/q, N).

This is the other half of a pair: it reads what a column cut left in place. In the forward pass, one
all-reduce adds up the products. In the backward pass there is no barrier, since dy is whole on
every rank and each rank computes its own channels of dx.
"""

from __future__ import annotations

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
