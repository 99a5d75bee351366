"""The message cases: ping-pong, windows, rings, fans, and a barrier.

Each case posts the same messages through `mpipar.comm` or by bare mpi4py calls. Latency and
windowed bandwidth follow OSU's definitions, but with as many distinct buffers as messages in
flight.
"""

from __future__ import annotations

import time

from bench.interconnect.cases import COMM, NAME, Case, Setup, mismatch, pattern
from bench.interconnect.posted import Posted

TAG, ACK_TAG = 5, 6
SHORT_BYTES = 16 << 10
SHORT_ROUNDS, LONG_ROUNDS = 50, 10  # round trips between two looks at the clock, like OSU's loop
LATE_SECONDS = 0.01
MOST_MESSAGES = 4096  # of a rank at once whose contents tell them apart


class BareNames:
    """mpi4py's own calls under the names that `mpipar.comm` has for them."""

    def __init__(self, mpi):
        self.isend, self.irecv, self.send, self.recv = mpi.Isend, mpi.Irecv, mpi.Send, mpi.Recv


class Messages(Case):
    """Buffers for `sends` and `receives` messages at once, and the two ways to post them."""

    def __init__(self, setup: Setup, via: str):
        super().__init__(setup, via)
        sends, receives = self.counts()
        count = self.elements()
        self.out = setup.arena.cut("send", sends, count) if sends else None
        self.into = setup.arena.cut("receive", receives, count) if receives else None
        self.ack = self.ops.zeros((1,), label="buffers")
        wire, self.label = (self.comm, (NAME,)) if via == COMM else (BareNames(self.mpi), ())
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


class Latency(Messages):
    """Ping-pong: half a round trip. A sample has several, each with its own buffers if rotated."""

    name = "latency"

    def __init__(self, setup, via):
        rounds = SHORT_ROUNDS if setup.size <= SHORT_BYTES else LONG_ROUNDS
        room = max(1, setup.arena.footprint // max(1, setup.size))
        self.rounds = {"reused": rounds, "rotated": min(rounds, room), "cold": 1}[
            setup.arena.policy]
        self.same = self.rounds if setup.arena.policy == "reused" else 1  # uses of each buffer
        self.per_sample = 2 * self.rounds
        super().__init__(setup, via)

    def counts(self):
        return self.rounds // self.same, self.rounds // self.same

    def sources(self):
        return [(1 - self.index, number) for number in range(self.rounds // self.same)]

    def run(self):
        send, recv, peer, label = self.send, self.recv, 1 - self.index, self.label
        xs, ys = self.xs * self.same, self.ys * self.same
        if self.index == 0:
            for x, y in zip(xs, ys, strict=True):
                send(x, peer, TAG, *label)
                recv(y, peer, TAG, *label)
        else:
            for x, y in zip(xs, ys, strict=True):
                recv(y, peer, TAG, *label)
                send(x, peer, TAG, *label)

    def volume(self):
        size = self.elements() * self.item
        return {"size_bytes": size, "bytes_in": size, "bytes_out": size, "wire_bytes": size}


class Bandwidth(Messages):
    """A window of messages one way, then one short answer; the time is that of one message."""

    name = "bandwidth"
    both = False

    def __init__(self, setup, via):
        most = max(2, setup.arena.footprint // max(1, setup.size))
        self.window = self.per_sample = min(setup.window, most)
        super().__init__(setup, via)

    def counts(self):
        sends = self.window if self.both or self.index == 0 else 0
        receives = self.window if self.both or self.index == 1 else 0
        return sends, receives

    def sources(self):
        return [(1 - self.index, number) for number in range(self.counts()[1])]

    def run(self):
        peer = 1 - self.index
        pending = [self.irecv(y, peer, TAG, *self.label) for y in self.ys]
        pending += [self.isend(x, peer, TAG, *self.label) for x in self.xs]
        for one in pending:
            self.wait(one)
        if self.index == 0:
            self.recv(self.ack, peer, ACK_TAG, *self.label)
        else:
            self.send(self.ack, peer, ACK_TAG, *self.label)


class Bidirectional(Bandwidth):
    """Windows both ways at once: twice the bytes in the time of one message each way."""

    name, both = "bidirectional", True

    def volume(self):
        volume = super().volume()
        return volume | {"counted_bytes": 2 * volume["size_bytes"]}


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

    def volume(self):
        return {"size_bytes": 0, "bytes_in": 0, "bytes_out": 0, "wire_bytes": 0}

