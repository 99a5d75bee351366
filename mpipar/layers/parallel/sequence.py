"""Sequence parallelism: between two products, each rank holds a part of the tokens.

Each of q ranks holds T/q of them, so norms and residuals run on a part of the tokens and are stored
only once. The all-reduce of a product becomes a reduce-scatter, and an all-gather precedes the next
product. chunks.py covers the case that q does not divide T.

Letters: B batch, T tokens, D width, K and N a product's widths, q ranks of the group. Source:
Korthikanti et al., arXiv 2205.05198.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size, chunk_slice
from mpipar.comm.group import Comm
from mpipar.layers.parallel import chunks
from mpipar.layers.parallel.column import ColumnLinear
from mpipar.layers.parallel.linear import ReplicatedTokens
from mpipar.layers.parallel.row import RowLinear
from mpipar.layers.stash import Stash
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array


def gather(ops: Ops, x: Array, tokens: int, comm: Comm, name: str) -> Array:
    """Return the whole x (B, T, D) of all ranks' (B, ceil(T/q), D). Comm: one all_gather of x."""
    return chunks.join(ops, comm.all_gather(x, name), 1, tokens)


def scatter(ops: Ops, y: Array, comm: Comm, name: str) -> Array:
    """Return this rank's tokens (B, ceil(T/q), D) of the sum of all ranks' y (B, T, D).

    Comm: one reduce_scatter of y.
    """
    batch, tokens, width = y.shape
    parts = ops.zeros((comm.size, batch, chunk_size(tokens, comm.size), width), label="buffers")
    for group_rank in range(comm.size):
        own = y[:, chunk_slice(tokens, comm.size, group_rank)]
        ops.copy(parts[group_rank, :, : own.shape[1]], own)
    return comm.reduce_scatter(parts, name)


class SequenceShardedTokens(ReplicatedTokens):
    """Each rank of the group holds ceil(T/q) tokens; the last ones are padded."""

    partial_groups = ("tp",)

    def length(self, tokens: int) -> int:
        return chunk_size(tokens, self.comm.size)

    def positions(self, positions: Array) -> Array:
        """Return this rank's positions; padding gets position 0, because its gradient is zero."""
        return chunks.local_chunk(self.ops, positions, -1, self.comm)

    def gather(self, x: Array, tokens: int, name: str) -> Array:
        """Return all tokens (B, T, D), given those that each rank holds.

        Comm: one all_gather of x.
        """
        return gather(self.ops, x, tokens, self.comm, name)

    def scatter(self, y: Array, name: str) -> Array:
        """Return this rank's tokens of the sum of all ranks' y (B, T, D).

        Comm: one reduce_scatter of y.
        """
        return scatter(self.ops, y, self.comm, name)


class ColumnSequenceLinear(ColumnLinear):
    """`ColumnLinear` of tokens that are divided among the ranks: y (B, T, N/q) of x (B, T/q, K).

    The forward pass gathers x. In the backward pass a reduce-scatter of dx replaces the all-reduce.
    A rank keeps only its own tokens of x, so the weight gradient gathers x again. chunks.py covers
    the case that q does not divide T.
    """

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, N/q) of x (B, T/q, K). Comm: one all_gather of x over tp."""
        stash[self.name, "x"] = x
        whole = gather(self.ops, x, stash.batch.shape[1], self.comm, self.name)  # (B, T, K)
        return self.ops.matmul_bias(whole, self.w, self.b)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T/q, K) of dy (B, T, N/q). Comm: one reduce_scatter of dx over tp."""
        stash[self.name, "dy"] = dy
        dx = self.ops.matmul_nt(dy, self.w)  # (B, T, K), of this rank's columns only
        return scatter(self.ops, dx, self.comm, self.name)

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T dy over all tokens to dw (K, N/q), and the sum of dy to db.

        Comm: one all_gather of x over tp.
        """
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        x = gather(self.ops, x, stash.batch.shape[1], self.comm, self.name)  # (B, T, K)
        self.ops.matmul_tn_add_sums(x, dy, self.dw, self.db)


class RowSequenceLinear(RowLinear):
    """`RowLinear` whose result is divided among the ranks by tokens: y (B, T/q, N).

    A reduce-scatter sums y and leaves each rank with its own tokens. The backward pass gathers dy
    once, for both gradients. chunks.py covers the case that q does not divide T.
    """

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T/q, N) of x (B, T, K/q). Comm: one reduce_scatter of y over tp."""
        stash[self.name, "x"] = x
        y = scatter(self.ops, self.ops.matmul(x, self.w), self.comm, self.name)
        return self._plus_bias(y)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, K/q) of dy (B, T/q, N). Comm: one all_gather of dy over tp."""
        dy = gather(self.ops, dy, stash.batch.shape[1], self.comm, self.name)  # (B, T, N)
        stash[self.name, "dy"] = dy
        return self.ops.matmul_nt(dy, self.w)
