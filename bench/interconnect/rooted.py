"""The collectives with a root, the first rank: broadcast, reduce, gather and scatter."""

from __future__ import annotations

from functools import partial

from bench.interconnect.cases import (
    BARE,
    COMM,
    NAME,
    AllGather,
    AllReduce,
    Blocks,
    Collective,
)


class Gather(AllGather):
    """An all-gather whose result the first rank alone gets; mpipar.comm has none."""

    name = "gather"
    vias = (BARE,)

    def bare(self, x, y):
        return partial(self.mpi.Gather, x, None if self.index else y, root=0)

    def has_result(self):
        return self.index == 0

    def volume(self):
        found = super().volume()
        if self.index:
            return found | {"bytes_out": 0, "wire_bytes": found["bytes_in"]}
        return found | {"wire_bytes": 0}


class Scatter(Blocks):
    """A scatter: part j of the first rank's array goes to rank j; mpipar.comm has none."""

    name = "scatter"
    vias = (BARE,)

    def shape_out(self):
        return self.parts()[1:]

    def bare(self, x, y):
        return partial(self.mpi.Scatter, None if self.index else x, y, root=0)

    def expected(self):
        return self.pattern(self.index, self.ranks)

    def volume(self):
        found = super().volume()
        if self.index:
            return found | {"bytes_in": 0, "wire_bytes": 0}
        return found | {"wire_bytes": found["bytes_in"] - found["bytes_out"]}


class Broadcast(Collective):
    """A broadcast: the first rank of the group sends its array to all others."""

    name = "broadcast"

    def through_comm(self, x, y):
        return partial(self.comm.broadcast, x, 0, NAME)

    def bare(self, x, y):
        return partial(self.mpi.Bcast, x, root=0)

    def expected(self):
        return self.pattern(0)

    def volume(self):
        return super().volume() | ({"bytes_in": 0} if self.index else {})


class Reduce(AllReduce):
    """A reduction: the first rank of the group gets the sum of all ranks' vectors, in place."""

    name, operation, wide = "reduce", "reduce", True
    vias = (COMM, BARE)

    def through_comm(self, x, y):
        return partial(self.comm.reduce, x, 0, NAME)

    def bare(self, x, y):
        if self.index:
            return partial(self.mpi.Reduce, x, None, root=0)
        return partial(self.mpi.Reduce, self.mpi4py.IN_PLACE, x, root=0)

    def has_result(self):
        return self.index == 0

    def volume(self):
        return super().volume() | ({"bytes_out": 0} if self.index else {})
