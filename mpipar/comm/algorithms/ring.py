"""The ring: each rank sends to the next one and receives from the one before.

The sum of a piece grows as it travels around the ring. After size - 1 hops every rank has the whole
sum of one piece, which then goes around once more. Each rank sends 2 (size - 1) / size of the
array, the minimum, in 2 (size - 1) messages. Source: Patarasu and Yuan, doi
10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

import numpy as np

from mpipar.comm.algorithms.steps import Posted, Steps, StepwiseTransport, add, in_line
from mpipar.comm.request import Request
from mpipar.ops.signature import Array


class RingTransport(StepwiseTransport):
    """Sums and gathers around a ring."""

    def hop(self, tag: int, sent: Array, received: Array) -> Request:
        """Pass a piece on and receive the next one."""
        return self.exchange(
            tag, sent, (self.index + 1) % self.size, received, (self.index - 1) % self.size
        )

    def scattered(self, pieces: list[Array], tag: int) -> Steps:
        """Leave the whole sum of this rank's piece in pieces[index]; the others become invalid."""
        room = np.empty_like(pieces[0])
        for hop in range(1, self.size):
            sent, grown = (pieces[(self.index - hop - ahead) % self.size] for ahead in (0, 1))
            yield self.hop(tag, sent, room[: len(grown)])
            add(grown, room[: len(grown)], grown)

    def gathered(self, pieces: list[Array], tag: int) -> Steps:
        """Leave pieces[index] of every rank in pieces."""
        for hop in range(self.size - 1):
            sent, new = (pieces[(self.index - hop - ahead) % self.size] for ahead in (0, 1))
            yield self.hop(tag, sent, new)

    def summed(self, x: Array) -> Steps:
        pieces, tag = self.pieces(x), self.next_tag()
        yield from self.scattered(pieces, tag)
        yield from self.gathered(pieces, tag)

    def kept_in_front(self, pieces: list[Array]) -> Steps:
        """Leave the sum of this rank's piece in pieces[0]."""
        yield from self.scattered(pieces, self.next_tag())
        if self.index > 0:
            pieces[0][:] = pieces[self.index]

    def ireduce_scatter(self, x: Array) -> Request:
        return Posted(self.kept_in_front([in_line(part) for part in x]))

    def iall_gather(self, x: Array) -> Request:
        return Posted(self.gathered([in_line(part) for part in x], self.next_tag()))

    def reduce_scatter(self, x: Array) -> Array:
        whole = x.copy()  # the caller's x stays unchanged
        self.ireduce_scatter(whole).Wait()
        return whole[0]

    def all_gather(self, x: Array, group_size: int) -> Array:
        y = self.new((group_size, *x.shape), x.dtype)
        y[self.index] = x
        self.iall_gather(y).Wait()
        return y
