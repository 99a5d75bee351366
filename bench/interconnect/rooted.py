"""The collectives with a root, the first rank: broadcast, reduce, gather and scatter."""

from __future__ import annotations

from functools import partial

from bench.interconnect.cases import BARE, COMM, NAME, AllReduce, Blocks, Collective
from mpipar.comm.record import wire_bytes


class Rooted(Blocks):
    """Base of gather and scatter, which training does not use: mpipar.comm has neither."""

    vias = (BARE,)

    def moved(self, own: int, whole: int) -> dict:
        """The volume, where this rank puts in `own` parts and gets `whole` of them."""
        part = self.elements(self.ranks) * self.item // self.ranks
        return {"size_bytes": part * self.ranks, "bytes_in": own * part, "bytes_out": whole * part}


class Gather(Rooted):
    """A gather: the first rank of the group receives the parts of all ranks."""

    name = "gather"

    def shape_in(self):
        return self.parts()[1:]

    def shape_out(self):
        return self.parts()

    def bare(self, x, y):
        return partial(self.mpi.Gather, x, None if self.index else y, root=0)

    def given(self):
        return self.pattern(self.index, self.ranks)

    def expected(self):
        return [self.pattern(index, self.ranks) for index in range(self.ranks)]

    def has_result(self):
        return self.index == 0

    def volume(self):
        found = self.moved(1, 0 if self.index else self.ranks)
        return found | {"wire_bytes": found["bytes_in"] if self.index else 0}


class Scatter(Rooted):
    """A scatter: part j of the first rank's array goes to rank j."""

    name = "scatter"

    def shape_in(self):
        return self.parts()

    def shape_out(self):
        return self.parts()[1:]

    def bare(self, x, y):
        return partial(self.mpi.Scatter, None if self.index else x, y, root=0)

    def expected(self):
        return self.pattern(self.index, self.ranks)

    def volume(self):
        found = self.moved(0 if self.index else self.ranks, 1)
        return found | {"wire_bytes": max(0, found["bytes_in"] - found["bytes_out"])}


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
        size = self.elements() * self.item
        return {"size_bytes": size, "bytes_in": size if self.index == 0 else 0, "bytes_out": size,
                "wire_bytes": wire_bytes("broadcast", size, self.ranks)}


class Reduce(AllReduce):
    """A reduction: the first rank of the group gets the sum of all ranks' vectors, in place."""

    name, wide = "reduce", True
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
        size = self.elements() * self.item
        return {"size_bytes": size, "bytes_in": size, "bytes_out": 0 if self.index else size,
                "wire_bytes": wire_bytes("reduce", size, self.ranks)}
