"""Cut by input channels, each layer alone: y (.., N) = sum over ranks of x (.., K/q) @ w (K/q, N).

This is the mirror image of the `gather` cut: x is whole on every rank, and each rank multiplies its
own channels of it. In the forward pass one all-reduce adds up the products; in the backward pass
each rank computes only its own channels of dx, and one all-gather joins them. The gradients are the
same. This cut is here for comparison.
"""

from __future__ import annotations

from mpipar.layers.parallel import chunks
from mpipar.layers.parallel.linear import Linear
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class ReduceLinear(Linear):
    """y = x @ w + b, whose terms of the sum over K are divided among the ranks; x is whole."""

    cuts_outputs = False

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (.., N) of x (.., K). Comm: one all_reduce of y over tp."""
        stash[self.name, "x"] = x
        own = chunks.local_chunk(self.ops, x, -1, self.comm)  # (.., K/q)
        y = self.comm.all_reduce(self.ops.matmul(own, self.w), self.name)
        return self._plus_bias(y)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (.., K) of dy (.., N). Comm: one all_gather of dx over tp."""
        stash[self.name, "dy"] = dy
        pieces = self.comm.all_gather(self.ops.matmul_nt(dy, self.w), self.name)  # (q, .., K/q)
        return chunks.join(self.ops, pieces, -1, self.inner)

    def backward_weight(self, stash: Stash) -> None:
        """Add (own channels of x)^T dy to dw (K/q, N), and the sum of dy to db (N,)."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        own = chunks.local_chunk(self.ops, x, -1, self.comm)
        self.ops.matmul_tn_add_sums(own, dy, self.dw, self.db)
