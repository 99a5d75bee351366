"""Cut by output channels; the outputs stay where they are: y (.., N/q) = x (.., K) @ w (K, N/q).

Every rank reads all of x and computes its own columns of y, so the forward pass needs no barrier.
In the backward pass, each rank's dx = dy @ w^T covers only its columns of the sum over N, and one
all-reduce adds up these partial sums.
"""

from __future__ import annotations

from mpipar.layers.parallel.linear import Linear
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class ColumnLinear(Linear):
    """y = x @ w + b, whose columns are divided among the ranks."""

    cuts_outputs = True
    bias_is_cut = True

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (.., N/q) of x (.., K)."""
        stash[self.name, "x"] = x
        return self.ops.matmul_bias(x, self.w, self.b)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (.., K) of dy (.., N/q). Comm: one all_reduce of dx over tp."""
        stash[self.name, "dy"] = dy
        dx = self.ops.matmul_nt(dy, self.w)  # (.., K), of this rank's columns only
        return self.comm.all_reduce(dx, self.name)

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T dy to dw (K, N/q), and the sum of dy to db (N/q,)."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        self.ops.matmul_tn_add_sums(x, dy, self.dw, self.db)
