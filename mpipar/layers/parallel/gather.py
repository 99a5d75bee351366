"""Cut by output channels, with the outputs gathered: the textbook picture of a partitioned layer.

y (.., N) = all-gather of x (.., K) @ w (K, N/q). Each layer stands alone, with a whole input and a
whole output, so every product takes an all-gather forward and an all-reduce backward, whereas the
column and row cuts take one all-reduce each way for a *pair* of products. The gradients are the
same. This cut is here for comparison.
"""

from __future__ import annotations

from mpipar.layers.parallel import chunks
from mpipar.layers.parallel.linear import Linear
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class GatherLinear(Linear):
    """y = x @ w + b, whose columns are divided among the ranks and then collected."""

    cuts_outputs = True

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (.., N) of x (.., K). Comm: one all_gather of y over tp."""
        stash[self.name, "x"] = x
        pieces = self.comm.all_gather(self.ops.matmul(x, self.w), self.name)  # (q, .., N/q)
        return self._plus_bias(chunks.join(self.ops, pieces, -1, self.outer))

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (.., K) of dy (.., N). Comm: one all_reduce of dx over tp."""
        stash[self.name, "dy"] = dy
        dx = self.ops.matmul_nt(chunks.local_chunk(self.ops, dy, -1, self.comm), self.w)
        return self.comm.all_reduce(dx, self.name)

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T (own columns of dy (.., N)) to dw (K, N/q), and the sum of dy to db (N,)."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        self.ops.matmul_tn_add(x, chunks.local_chunk(self.ops, dy, -1, self.comm), self.dw)
        if self.biases:
            self.ops.bias_backward_weight(dy, self.db)
