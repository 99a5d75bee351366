"""An all-to-all of unequal parts, as tokens that choose an expert make it."""

from __future__ import annotations

from functools import partial

import numpy as np

from bench.interconnect.cases import BARE, BARE_PARTS, COMM, NAME, Collective, Setup, pattern
from bench.interconnect.messages import TAG
from mpipar.comm.grid import runs
from mpipar.data.routing import shares


class UnevenAllToAll(Collective):
    """Part j goes to rank j, where an expert is; a routing says how long it is.

    By MPI_Alltoallv, through mpipar.comm and by a bare call, or as one bare message for each part.
    The size is what the rank that receives most receives, about: parts are whole elements.
    """

    name = "all-to-allv"
    vias = (COMM, BARE, BARE_PARTS)

    def __init__(self, setup: Setup, via: str, routing: str = "hot"):
        ranks = setup.comm.size
        parts = np.array([shares(routing, ranks, 1, rank, ranks) for rank in range(ranks)])
        each = setup.size / setup.arena.ops.dtype.itemsize / parts.sum(axis=0).max()
        # Elements from each rank to each.
        self.parts = np.ceil(np.round(parts * each, 6)).astype(int)
        super().__init__(setup, via)

    def sent(self) -> list[int]:
        return self.parts[self.index].tolist()

    def received(self) -> list[int]:
        return self.parts[:, self.index].tolist()

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
        senders = [rank for rank in others if self.received()[rank]]
        others = [rank for rank in others if self.sent()[rank]]
        xs = [x[run] for run in runs(self.sent())]
        ys = [y[run] for run in runs(self.received())]

        def exchange():
            pending = [self.mpi.Irecv(ys[rank], rank, TAG) for rank in senders]
            pending += [self.mpi.Isend(xs[rank], rank, TAG) for rank in others]
            self.ops.copy(ys[self.index], xs[self.index])
            self.wait_all(pending)

        return exchange

    def parts_of(self, index: int) -> list:
        """What the rank at a place sends, by receiver."""
        parts = self.parts[index].tolist()
        whole = pattern(index, sum(parts), self.ops.dtype)
        return [whole[run] for run in runs(parts)]

    def given(self):
        return np.concatenate(self.parts_of(self.index))

    def expected(self):
        return np.concatenate([self.parts_of(index)[self.index] for index in range(self.ranks)])

    def volume(self):
        own, others = self.parts[self.index], ~np.eye(self.ranks, dtype=bool)
        bytes_of = {
            "size_bytes": self.parts.sum(axis=0).max(), "bytes_in": own.sum(),
            "bytes_out": self.parts[:, self.index].sum(),
            "wire_bytes": own.sum() - own[self.index],
            "least_to_peer_bytes": self.parts[others].min(),
            "most_to_peer_bytes": self.parts[others].max()}
        return {name: int(count) * self.item for name, count in bytes_of.items()}
