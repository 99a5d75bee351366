"""Cuts with a whole input and a whole output: the textbook picture of a partitioned layer.

By output channels, the outputs are gathered: y (.., N) = all-gather of x (.., K) @ w (K, N/q). By
input channels, they are summed: y = sum over ranks of x (.., K/q) @ w (K/q, N). Each layer stands
alone, so every product takes an all-gather one way and an all-reduce the other, whereas the column
and row cuts take one all-reduce each way for a *pair* of products. The gradients are the same.
These cuts are here for comparison.
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
        return self._plus_bias(chunks.join(self.ops, pieces, -1, self.out_width))

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (.., K) of dy (.., N). Comm: one all_reduce of dx over tp."""
        stash[self.name, "dy"] = dy
        dx = self.ops.matmul_nt(chunks.local_chunk(self.ops, dy, -1, self.comm), self.w)
        return self.comm.all_reduce(dx, self.name)

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T (own columns of dy (.., N)) to dw (K, N/q), and the sum of dy to db (N,)."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        self.ops.matmul_tn_add(x, chunks.local_chunk(self.ops, dy, -1, self.comm), self.dw)
        if (db := self.db) is not None:
            self.ops.bias_backward_weight(dy, db)


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
        return chunks.join(self.ops, pieces, -1, self.in_width)

    def backward_weight(self, stash: Stash) -> None:
        """Add (own channels of x)^T dy to dw (K/q, N), and the sum of dy to db (N,)."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        own = chunks.local_chunk(self.ops, x, -1, self.comm)
        self.ops.matmul_tn_add_sums(own, dy, self.dw, self.db)
