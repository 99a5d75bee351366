"""The message cases: rings, fans, random pairs, and a barrier; `paired` has ping-pong and windows.

Each case posts the same messages through `mpipar.comm` or by bare mpi4py calls.
"""

from __future__ import annotations

import random
import time

from bench.interconnect.cases import COMM, NAME, Case, Posted, Setup, mismatch, pattern

TAG = 5
LATE_SECONDS = 0.01
MOST_MESSAGES = 4096  # of a rank at once whose contents tell them apart


class BareNames:
    """mpi4py's own calls under the names that `mpipar.comm` has for them.

    known(x): x in a type that MPI knows; None where it knows x.
    """

    def __init__(self, mpi, known=None):
        calls = mpi.Isend, mpi.Irecv, mpi.Send, mpi.Recv
        if known is not None:
            calls = [lambda x, *more, call=call: call(known(x), *more) for call in calls]
        self.isend, self.irecv, self.send, self.recv = calls


class Messages(Case):
    """Buffers for `sends` and `receives` messages at once, and the two ways to post them."""

    def __init__(self, setup: Setup, via: str):
        super().__init__(setup, via)
        sends, receives = self.counts()
        count = self.elements()
        self.out = setup.arena.cut("send", sends, count) if sends else None
        self.into = setup.arena.cut("receive", receives, count) if receives else None
        self.ack = self.ops.zeros((1,), label="buffers")
        wire, self.label = (self.comm, (NAME,)) if via == COMM else (
            BareNames(self.mpi, self.known if self.item == 2 else None), ())
        self.isend, self.irecv = wire.isend, wire.irecv
        self.send, self.recv = wire.send, wire.recv

    def counts(self) -> tuple[int, int]:
        """Messages that this rank sends and receives in one iteration."""
        raise AssertionError("each case says how many")

    def sources(self) -> list[int]:
        """The sender of each message that this rank receives."""
        return []

    def prepare(self) -> None:
        self.xs = self.out.take() if self.out else []
        self.ys = self.into.take() if self.into else []
        if self.out and self.out.views is None:
            for x in self.xs:
                x[:] = 0

    def check(self) -> list[str]:
        self.prepare()
        for place, x in enumerate(self.xs):
            self.put(x, pattern(self.index * MOST_MESSAGES + place, len(x), self.ops.dtype))
        for y in self.ys:
            y[:] = -1
        self.run()
        found = []
        for place, (y, (source, number)) in enumerate(zip(self.ys, self.sources(), strict=True)):
            expected = pattern(source * MOST_MESSAGES + number, len(y), self.ops.dtype)
            found += mismatch(self.ops, y, expected,
                              f"rank {self.index}, message {place} from rank {source}")
        return found

    def volume(self):
        size = self.elements() * self.item
        sends, receives = (count * size // self.per_sample for count in self.counts())
        return {"size_bytes": size, "bytes_in": sends, "bytes_out": receives, "wire_bytes": sends}


class Ring(Posted, Messages):
    """Everybody sends to the next rank while receiving from the one before."""

    name = "ring"

    def counts(self):
        return 1, 1

    def sources(self):
        return [((self.index - 1) % self.ranks, 0)]

    def post(self):
        receive = self.irecv(self.ys[0], (self.index - 1) % self.ranks, TAG, *self.label)
        send = self.isend(self.xs[0], (self.index + 1) % self.ranks, TAG, *self.label)
        return [receive, send]


class FanIn(Posted, Messages):
    """All other ranks send to the first at once; the size is that of one message."""

    name = "fan-in"

    def peers(self) -> range:
        """The first rank has all others as peers; these have the first."""
        return range(1) if self.index else range(1, self.ranks)

    def counts(self):
        return (1, 0) if self.index else (0, self.ranks - 1)

    def sources(self):
        return [] if self.index else [(peer, 0) for peer in self.peers()]

    def post(self):
        pending = [self.irecv(y, peer, TAG, *self.label)
                   for y, peer in zip(self.ys, self.peers(), strict=False)]
        return pending + [self.isend(x, peer, TAG, *self.label)
                          for x, peer in zip(self.xs, self.peers(), strict=False)]

    def volume(self):
        volume = super().volume()
        return volume | {"counted_bytes": (self.ranks - 1) * volume["size_bytes"]}


class FanOut(FanIn):
    """The first rank sends to all others at once, different data to each."""

    name = "fan-out"

    def counts(self):
        return (0, 1) if self.index else (self.ranks - 1, 0)

    def sources(self):
        return [(0, self.index - 1)] if self.index else []


class Bisection(Messages):
    """Random pairs, anew for each iteration: one rank of each pair sends to the other.

    Every rank is in one pair; of an odd number of ranks one rests. Links that many pairs share show
    in it, whatever the order of the ranks is. Source: Hoefler, Schneider, Lumsdaine, Multistage
    switches are not crossbars, CLUSTER 2008 (effective bisection bandwidth).
    """

    name = "bisection"

    def __init__(self, setup: Setup, via: str):
        self.random = random.Random(0)  # noqa: S311 - the same orders on all ranks
        super().__init__(setup, via)

    def counts(self):
        return 1, 1

    def prepare(self):
        super().prepare()
        order, half = list(range(self.ranks)), self.ranks // 2
        self.random.shuffle(order)
        place = order.index(self.index)
        self.peer = order[(place + half) % (2 * half)] if place < 2 * half else None
        self.sends = place < half
        if self.sends or self.peer is None:
            self.ys = []

    def sources(self):
        return [(self.peer, 0)] if self.ys else []

    def run(self):
        if self.ys:
            self.recv(self.ys[0], self.peer, TAG, *self.label)
        elif self.sends:
            self.send(self.xs[0], self.peer, TAG, *self.label)

    def volume(self):
        volume, pairs = super().volume(), self.ranks // 2
        return volume | {"counted_bytes": pairs * volume["size_bytes"], "messages": pairs}


class Barrier(Case):
    """No data: the time until every rank has left."""

    name, sized = "barrier", False

    def prepare(self):
        pass

    def run(self):
        if self.via == COMM:
            self.comm.barrier(NAME)
        else:
            self.mpi.Barrier()

    def check(self) -> list[str]:
        """Rank 0 comes late; no other rank may leave before it comes."""
        start = time.perf_counter()
        self.mpi.Barrier()
        if self.index == 0:
            time.sleep(LATE_SECONDS)
        self.run()
        left = time.perf_counter() - start
        return [] if left >= LATE_SECONDS else [f"rank {self.index} left before rank 0 came"]

