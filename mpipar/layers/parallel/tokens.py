"""The tokens of a tensor-parallel group between one pair of products and the next.

Whole: every rank holds all T tokens, and a sum over ranks is an all-reduce.

Cut (sequence parallelism): each rank holds T/q of them, so norms and residuals run on a part of the
tokens and are stored only once. The all-reduce becomes a reduce-scatter, and an all-gather precedes
the next product. chunks.py covers the case that q does not divide T.

Letters: B batch, T tokens, D width, q ranks of the group. Source: Korthikanti et al., arXiv
2205.05198.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size, chunk_slice
from mpipar.comm.group import Comm
from mpipar.layers.parallel import chunks
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
    for place in range(comm.size):
        own = y[:, chunk_slice(tokens, comm.size, place)]
        ops.copy(parts[place, :, : own.shape[1]], own)
    return comm.reduce_scatter(parts, name)


class ReplicatedTokens:
    """Every rank of the group holds all tokens.

    partial_groups: the groups over which gradients are partial for parameters that work on held
    tokens.
    """

    partial_groups: tuple[str, ...] = ()

    def __init__(self, ops: Ops, comm: Comm) -> None:
        self.ops, self.comm = ops, comm

    def length(self, tokens: int) -> int:
        """Return how many tokens of T this rank holds."""
        return tokens

    def positions(self, positions: Array) -> Array:
        """Return those of all positions (.., T) that belong to the tokens that this rank holds."""
        return positions

    def gather(self, x: Array, tokens: int, name: str) -> Array:
        """Return all tokens (B, T, D), given those that each rank holds."""
        return x

    def scatter(self, y: Array, name: str) -> Array:
        """Return what this rank holds of the sum of all ranks' y (B, T, D).

        Comm: one all_reduce of y.
        """
        return self.comm.all_reduce(y, name)


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
