"""How a tensor-parallel group holds the tokens between one pair of products and the next.

Whole: every rank holds all T tokens. A sum over ranks is an all-reduce.

Cut (sequence parallelism): each rank holds T/q of them. Norms and residuals then run on a share and
are kept only once. The all-reduce becomes a reduce-scatter, and an all-gather comes before the next
product. shares.py says what happens if q does not divide T.

Letters: B batch, T tokens, D width, q ranks of the group. Source: Korthikanti et al., arXiv
2205.05198.
"""

from __future__ import annotations

from mpipar.comm.grid import piece, share
from mpipar.partition import shares


def gather(ops, x, tokens, comm, name):
    """Whole x (B, T, D) of everybody's (B, ceil(T/q), D). Comm: one all_gather."""
    return shares.join(ops, comm.all_gather(x, name), 1, tokens)


def scatter(ops, y, comm, name):
    """This rank's tokens (B, ceil(T/q), D) of the sum of all ranks' y (B, T, D).

    Comm: one reduce_scatter.
    """
    batch, tokens, width = y.shape
    parts = ops.zeros((comm.size, batch, share(tokens, comm.size), width), label="buffers")
    for place in range(comm.size):
        own = y[:, piece(tokens, comm.size, place)]
        ops.copy(parts[place, :, :own.shape[1]], own)
    return comm.reduce_scatter(parts, name)


class WholeTokens:
    """Every rank of the group holds all tokens.

    cuts: the cuts of the two products of a pair.
    partial_groups: for parameters that work on held tokens, the groups over which their gradients
    are partial.
    """

    cuts = ("column", "row")
    partial_groups = ()

    def __init__(self, ops, comm):
        self.ops, self.comm = ops, comm

    def length(self, tokens):
        """How many tokens of T this rank holds."""
        return tokens

    def positions(self, positions):
        """The positions of the tokens that this rank holds, out of all positions (.., T)."""
        return positions

    def gather(self, x, tokens, name):
        """All tokens (B, T, D) of what the ranks hold."""
        return x

    def scatter(self, y, name):
        """What this rank holds of the sum of all ranks' y (B, T, D). Comm: one all_reduce."""
        return self.comm.all_reduce(y, name)


class CutTokens(WholeTokens):
    """Each rank of the group holds ceil(T/q) tokens; the last ones are padded."""

    partial_groups = ("tp",)

    def __init__(self, ops, comm, cuts):
        super().__init__(ops, comm)
        self.cuts = cuts

    def length(self, tokens):
        return share(tokens, self.comm.size)

    def positions(self, positions):
        """Padding is at position 0, because its gradient is zero."""
        return shares.own(self.ops, positions, -1, self.comm)

    def gather(self, x, tokens, name):
        """All tokens (B, T, D) of what the ranks hold. Comm: one all_gather."""
        return gather(self.ops, x, tokens, self.comm, name)

    def scatter(self, y, name):
        """This rank's tokens of the sum of all ranks' y (B, T, D). Comm: one reduce_scatter."""
        return scatter(self.ops, y, self.comm, name)


PAIRS = {"plain": ("column_sp", "row_sp"), "ring": ("column_ring", "row_ring")}


def hold(ops, config, comm):
    """How a model with this ModelConfig holds its tokens over a group."""
    if comm.size == 1 or not config.sequence_parallel:
        return WholeTokens(ops, comm)
    return CutTokens(ops, comm, PAIRS[config.tp_matmul])
