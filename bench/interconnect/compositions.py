"""Collectives composed of others: timed as one case, and checked as a whole.

Two make an all-reduce. One is a reduce-scatter and an all-gather. The other does the same on two
levels, so that only a share of the vector crosses the slow links. The third is an all-to-all of
unequal parts, as tokens that choose an expert make it.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from bench.interconnect.cases import (
    BARE,
    BARE_PARTS,
    COMM,
    NAME,
    AllReduce,
    Collective,
    Setup,
    pattern,
)
from bench.interconnect.messages import TAG
from mpipar.comm.grid import runs
from mpipar.comm.group import Comm

HOT = 2  # times as much goes to the first rank as to any other


def blocks(ranks, count: int) -> list[tuple[int, ...]]:
    """The members of a group, grouped by blocks of `count` consecutive world ranks."""
    found: dict = {}
    for place in ranks:
        found.setdefault(place // count, []).append(place)
    return [tuple(block) for block in found.values()]


class ReduceScatterAllGather(AllReduce):
    """Each rank sums its part of the vector, then all ranks gather all parts."""

    name, in_place = "reduce-scatter+all-gather", False
    vias = (COMM, BARE)

    def elements(self, parts: int = 1) -> int:
        return super().elements(parts * self.ranks)

    def shape_in(self):
        return self.ranks, self.elements() // self.ranks

    def shape_out(self):
        return self.shape_in()

    def through_comm(self, x, y):
        return lambda: self.comm.all_gather(self.comm.reduce_scatter(x, NAME), NAME)

    def bare(self, x, y):
        def both():
            self.mpi.Reduce_scatter_block(x, y[self.index])
            self.mpi.Allgather(self.mpi4py.IN_PLACE, y)

        return both


class TwoLevel(ReduceScatterAllGather):
    """Sum the parts inside a block of ranks, sum each part over the blocks, gather inside.

    count: consecutive world ranks of a block. Every block has the same number of the group's
    members. Comm: two splits of the group.
    """

    name = "two-level-all-reduce"

    def __init__(self, setup: Setup, via: str, count: int = 1):
        own, apart = setup.comm.ranks[setup.comm.index], blocks(setup.comm.ranks, count)
        near = next(block for block in apart if own in block)
        self.levels = []  # their bare communicators
        self.near = self.level(setup, near)
        self.far = self.level(setup, tuple(block[near.index(own)] for block in apart))
        super().__init__(setup, via)

    def level(self, setup: Setup, members) -> Comm:
        """These members of the group on a communicator of their own, on the same transport."""
        group = setup.comm
        mpi = setup.mpi.Split(min(members), group.index)
        self.levels.append(mpi)
        return Comm(group.axis, members, mpi.rank, setup.connect(mpi), group.recorder)

    def shape_in(self):
        return self.near.size, self.elements() // self.near.size

    def through_comm(self, x, y):
        def levels():
            part = self.near.reduce_scatter(x, NAME)
            return self.near.all_gather(self.far.all_reduce(part, NAME), NAME)

        return levels

    def bare(self, x, y):
        (near, far), part = self.levels, y[self.near.index]

        def levels():
            near.Reduce_scatter_block(x, part)
            far.Allreduce(self.mpi4py.IN_PLACE, part)
            near.Allgather(self.mpi4py.IN_PLACE, y)

        return levels

    def close(self):
        self.near.close()
        self.far.close()


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
