"""Collectives composed of others: timed as one case, and checked as a whole.

Two make an all-reduce. One is a reduce-scatter and an all-gather. The other does the same on two
levels, so that only a share of the vector crosses the slow links. The third is an all-to-all of
unequal parts, as tokens that choose an expert make it.
"""

from __future__ import annotations

from bench.interconnect.cases import BARE, COMM, NAME, AllReduce, Setup
from bench.interconnect.messages import TAG, Messages
from mpipar.comm.group import Comm

BARE_ANY = "mpi4py Alltoallv"
HOT = 2  # times as much goes to the first rank as to any other


def blocks(ranks, count: int) -> list[tuple[int, ...]]:
    """The members of a group, grouped by blocks of `count` consecutive world ranks."""
    found: dict = {}
    for place in ranks:
        found.setdefault(place // count, []).append(place)
    return [tuple(block) for block in found.values()]


def cut(x, counts) -> list:
    """Views of consecutive stretches of x, with these numbers of elements."""
    ends = [sum(counts[:number + 1]) for number in range(len(counts))]
    return [x[end - count:end] for end, count in zip(ends, counts, strict=True)]


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
        self.near = self.level(setup, near)
        self.far = self.level(setup, tuple(block[near.index(own)] for block in apart))
        super().__init__(setup, via)

    @staticmethod
    def level(setup: Setup, members) -> Comm:
        """These members of the group on a communicator of their own, on the same transport."""
        group = setup.comm
        mpi = setup.mpi.Split(min(members), group.index)
        return Comm(group.axis, members, mpi.rank, setup.connect(mpi), group.recorder)

    def shape_in(self):
        return self.near.size, self.elements() // self.near.size

    def through_comm(self, x, y):
        def levels():
            part = self.near.reduce_scatter(x, NAME)
            return self.near.all_gather(self.far.all_reduce(part, NAME), NAME)

        return levels

    def bare(self, x, y):
        near, far, part = self.near.wire.mpi, self.far.wire.mpi, y[self.near.index]

        def levels():
            near.Reduce_scatter_block(x, part)
            far.Allreduce(self.mpi4py.IN_PLACE, part)
            near.Allgather(self.mpi4py.IN_PLACE, y)

        return levels

    def close(self):
        self.near.wire.close()
        self.far.wire.close()


class UnevenAllToAll(Messages):
    """Part j goes to rank j; the parts for rank 0, a hot expert, are twice as long as the others.

    Parts go as messages, through mpipar.comm and by bare calls, or by MPI_Alltoallv. The size is
    what rank 0 receives.
    """

    name = "all-to-allv"
    vias = (COMM, BARE, BARE_ANY)

    def elements(self, parts: int = 1) -> int:
        return super().elements(parts * HOT * self.ranks)

    def counts(self):
        return 1, 1  # stretches of memory, which `prepare` cuts into parts

    def part(self, rank: int) -> int:
        """Elements that each rank sends to `rank`."""
        return self.elements() // (HOT * self.ranks) * (HOT if rank == 0 else 1)

    def prepare(self):
        super().prepare()
        self.sent = [self.part(rank) for rank in range(self.ranks)]
        self.received = [self.part(self.index)] * self.ranks
        self.x, self.y = self.xs[0][:sum(self.sent)], self.ys[0][:sum(self.received)]
        self.xs, self.ys = cut(self.x, self.sent), cut(self.y, self.received)

    def sources(self):
        return [(rank, self.index) for rank in range(self.ranks)]

    def run(self):
        if self.via == BARE_ANY:
            self.mpi.Alltoallv((self.known(self.x), self.sent), (self.known(self.y), self.received))
            return
        others = [rank for rank in range(self.ranks) if rank != self.index]
        pending = [self.irecv(self.ys[rank], rank, TAG, *self.label) for rank in others]
        pending += [self.isend(self.xs[rank], rank, TAG, *self.label) for rank in others]
        self.ops.copy(self.ys[self.index], self.xs[self.index])
        self.wait_all(pending)

    def volume(self):
        sent = sum(map(self.part, range(self.ranks))) * self.item
        own = self.part(self.index) * self.item
        return {"size_bytes": self.elements() * self.item, "bytes_in": sent,
                "bytes_out": own * self.ranks, "wire_bytes": sent - own}
