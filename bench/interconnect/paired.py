"""The cases of pairs: ping-pong and windows, of one pair or of several pairs at once.

Of P ranks, rank i < P/2 talks to rank i + P/2, as in OSU's benchmarks of several pairs. Latency and
windows follow OSU's definitions, but with as many distinct buffers as messages in flight; with
--buffers osu there is one. Besides the calls of `mpipar.comm` and those of mpi4py, they have two
more ways: persistent requests are made before anything is timed, and a whole window starts with one
call; loops in C show what Python costs.
"""

from __future__ import annotations

from collections import Counter

from bench.interconnect import compiled
from bench.interconnect.cases import BARE, COMM, IN_C, PERSISTENT, TAG, Setup
from bench.interconnect.messages import Messages

ACK_TAG = 6
SHORT_BYTES = 16 << 10
SHORT_ROUNDS, LONG_ROUNDS = 50, 10  # round trips between two readings of the clock, like OSU's loop


class Kept:
    """Persistent requests, one for each message of a sample. init(x): makes one.

    MPI does not allow a request to restart before it is done, so messages of one buffer that are in
    flight together have a request each.
    """

    def __init__(self, init):
        self.init, self.made = init, {}

    def of(self, arrays) -> list:
        """Return the requests of these messages' arrays, which are made on first use."""
        times, found = Counter(), []
        for x in arrays:
            key = id(x), times[id(x)]
            times[id(x)] += 1
            if key not in self.made:
                self.made[key] = self.init(x)
            found.append(self.made[key])
        return found

    def close(self) -> None:
        for request in self.made.values():
            request.Free()


class Paired(Messages):
    """Who talks to whom, and how. first: this rank sends first, and its clock is used.

    same: how often a sample uses each of its buffers.
    """

    vias = (COMM, BARE, PERSISTENT, IN_C)
    same = 1

    def __init__(self, setup: Setup, via: str):
        half, place = setup.comm.size // 2, setup.comm.index
        self.first, self.pairs = place < half, half
        self.peer = place + half if self.first else place - half
        super().__init__(setup, via)
        self.kept = [
            Kept(lambda x: self.mpi.Send_init(self.known(x), self.peer, TAG)),
            Kept(lambda x: self.mpi.Recv_init(self.known(x), self.peer, TAG)),
        ]
        self.run = {PERSISTENT: self.run_kept, IN_C: self.run_in_c}.get(via, self.run_plain)

    def prepare(self):
        super().prepare()
        if self.via == PERSISTENT:
            self.requests = [
                kept.of(some * self.same)
                for kept, some in zip(self.kept, (self.xs, self.ys), strict=True)
            ]
            self.arrange()

    def arrange(self) -> None:
        """Prepare the requests for `run_kept`; this is not timed."""

    def run_in_c(self) -> None:
        """Run one sample in C. Comm: its messages."""
        self.loop(None, 1, self.xs, self.ys)

    def in_c(self, team, samples):
        xs, ys = [], []
        for _ in range(samples):
            self.prepare()
            xs += self.xs * self.same
            ys += self.ys * self.same
        return self.loop(team, samples, xs, ys)

    def loop(self, team, samples: int, xs, ys):
        """Run samples in C; return (entered, left). xs, ys: all their buffers. Comm: their
        messages.
        """
        return compiled.run(
            self.setup.loops,
            self.function,
            self.mpi,
            team,
            samples,
            xs=xs,
            ys=ys,
            ack=self.ack,
            count=self.elements() * self.item,
            peer=self.peer,
            first=self.first,
        )

    def close(self):
        for kept in self.kept:
            kept.close()


class Latency(Paired):
    """Ping-pong: half a round trip. A sample has several, each with its own buffers if rotated."""

    name, function = "latency", "latency"

    def __init__(self, setup, via):
        rounds = SHORT_ROUNDS if setup.size <= SHORT_BYTES else LONG_ROUNDS
        room = max(1, setup.arena.footprint // max(1, setup.size))
        self.rounds = {"rotated": min(rounds, room), "cold": 1}.get(setup.arena.policy, rounds)
        self.same = self.rounds if setup.arena.policy in ("reused", "osu") else 1
        self.per_sample = 2 * self.rounds
        super().__init__(setup, via)

    def counts(self):
        return self.rounds // self.same, self.rounds // self.same

    def sources(self):
        return [(self.peer, number) for number in range(self.rounds // self.same)]

    def run_plain(self) -> None:
        """Run a sample with plain calls. Comm: the messages, one after the other."""
        send, recv, peer, label = self.send, self.recv, self.peer, self.label
        xs, ys = self.xs * self.same, self.ys * self.same
        if self.first:
            for x, y in zip(xs, ys, strict=True):
                send(x, peer, TAG, *label)
                recv(y, peer, TAG, *label)
        else:
            for x, y in zip(xs, ys, strict=True):
                recv(y, peer, TAG, *label)
                send(x, peer, TAG, *label)

    def run_kept(self) -> None:
        """Run a sample with persistent requests. Comm: the same messages."""
        for call in self.calls:
            call()

    def arrange(self):
        pairs = zip(*(self.requests if self.first else self.requests[::-1]), strict=True)
        self.calls = [call for pair in pairs for one in pair for call in (one.Start, one.Wait)]

    def volume(self):
        size = self.elements() * self.item
        return {"size_bytes": size, "bytes_in": size, "bytes_out": size, "wire_bytes": size}


class MultiLatency(Latency):
    """Ping-pong of all pairs at once; the slowest pair counts."""

    name = "multi-latency"


class Bandwidth(Paired):
    """A window of messages one way, then one short answer; the time is that of one message."""

    name, function = "bandwidth", "window"
    both = False

    def __init__(self, setup, via):
        most = max(2, setup.arena.footprint // max(1, setup.size))
        one = setup.arena.policy == "osu"
        self.window = self.per_sample = setup.window if one else min(setup.window, most)
        self.same = self.window if one else 1
        super().__init__(setup, via)

    def counts(self):
        each = self.window // self.same
        return each * (self.both or self.first), each * (self.both or not self.first)

    def sources(self):
        return [(self.peer, number) for number in range(self.counts()[1])]

    def run_plain(self) -> None:
        """Run a sample with plain calls. Comm: the window and its answer."""
        peer, label = self.peer, self.label
        pending = [self.irecv(y, peer, TAG, *label) for y in self.ys * self.same]
        pending += [self.isend(x, peer, TAG, *label) for x in self.xs * self.same]
        self.wait_all(pending)
        self.answer()

    def run_kept(self) -> None:
        """Run a sample with persistent requests: MPI posts the whole window in one call. Comm: the
        same.
        """
        sends, receives = self.requests
        self.mpi4py.Prequest.Startall(receives + sends)
        self.wait_all(receives + sends)
        self.answer()

    def answer(self) -> None:
        """Send one short message back. Comm: this message."""
        if self.first:
            self.recv(self.ack, self.peer, ACK_TAG, *self.label)
        else:
            self.send(self.ack, self.peer, ACK_TAG, *self.label)

    def volume(self):
        size = self.elements() * self.item
        return {
            "size_bytes": size,
            "bytes_in": size * (self.both or self.first),
            "bytes_out": size * (self.both or not self.first),
            "wire_bytes": size * (self.both or self.first),
            "counted_bytes": size * self.pairs * (1 + self.both),
            "messages": self.pairs * (1 + self.both),
        }


class Bidirectional(Bandwidth):
    """Windows both ways at once: twice the bytes in the time of one message each way."""

    name, both = "bidirectional", True


class MultiBandwidth(Bandwidth):
    """Windows of all pairs at once: the bytes and the messages of all of them count."""

    name = "multi-bandwidth"
