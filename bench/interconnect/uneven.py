"""An all-to-all of unequal parts, as tokens that choose an expert make it."""

from __future__ import annotations

from functools import partial

import numpy as np

from bench.interconnect.cases import BARE, BARE_PARTS, COMM, NAME, Collective, pattern
from bench.interconnect.messages import TAG
from mpipar.comm.grid import runs

HOT = 2  # times as much goes to the first rank as to any other


class UnevenAllToAll(Collective):
    """Part j goes to rank j; the parts for rank 0, a hot expert, are twice as long as the others.

    By MPI_Alltoallv, through mpipar.comm and by a bare call, or as one bare message for each part.
    The size is what rank 0 receives.
    """

    name = "all-to-allv"
    vias = (COMM, BARE, BARE_PARTS)

    def elements(self, parts: int = 1) -> int:
        return super().elements(parts * HOT * self.ranks)

    def part(self, rank: int) -> int:
        """Elements that each rank sends to `rank`."""
        return self.elements() // (HOT * self.ranks) * (HOT if rank == 0 else 1)

    def sent(self) -> list[int]:
        return [self.part(rank) for rank in range(self.ranks)]

    def received(self) -> list[int]:
        return [self.part(self.index)] * self.ranks

    def shape_in(self):
        return (sum(self.sent()),)

    def shape_out(self):
        return (sum(self.received()),)

    def through_comm(self, x, y):
        sent, received = self.sent(), self.received()
        return lambda: self.comm.all_to_allv(x, sent, NAME, received)[0]

    def bare(self, x, y):
        return partial(self.mpi.Alltoallv, (x, self.sent()), (y, self.received()))

    def messages(self, x, y):
        others = [rank for rank in range(self.ranks) if rank != self.index]
        xs = [x[run] for run in runs(self.sent())]
        ys = [y[run] for run in runs(self.received())]

        def exchange():
            pending = [self.mpi.Irecv(ys[rank], rank, TAG) for rank in others]
            pending += [self.mpi.Isend(xs[rank], rank, TAG) for rank in others]
            self.ops.copy(ys[self.index], xs[self.index])
            self.wait_all(pending)

        return exchange

    def parts_of(self, index: int) -> list:
        """What the rank at a place sends, by receiver."""
        whole = pattern(index, sum(self.sent()), self.ops.dtype)
        return [whole[run] for run in runs(self.sent())]

    def given(self):
        return np.concatenate(self.parts_of(self.index))

    def expected(self):
        return np.concatenate([self.parts_of(index)[self.index] for index in range(self.ranks)])

    def volume(self):
        sent, own = sum(self.sent()) * self.item, self.part(self.index) * self.item
        return {"size_bytes": self.elements() * self.item, "bytes_in": sent,
                "bytes_out": own * self.ranks, "wire_bytes": sent - own}
