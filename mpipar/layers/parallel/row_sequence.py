"""The row cut with tokens cut between the products: y (B, T/q, N) of x (B, T, K/q).

In the forward pass, a reduce-scatter sums over the ranks and leaves each with its own tokens of y.
The backward pass gathers dy once, for both gradients. chunks.py covers the case that q does not
divide T.
"""

from __future__ import annotations

from mpipar.layers.parallel import tokens
from mpipar.layers.parallel.linear import Linear
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class RowSequenceLinear(Linear):
    """`RowLinear` whose result is divided among the ranks by tokens."""

    cuts_outputs = False

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

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T dy over all tokens to dw (K/q, N), and the sum of dy to db (N,)."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        self.ops.matmul_tn_add_sums(x, dy, self.dw, self.db)
