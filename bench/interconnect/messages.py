"""The message cases: rings, fans, random pairs, the messages of a pipeline, and a barrier.

Each case posts the same messages through `mpipar.comm` or by bare mpi4py calls; `paired` has
ping-pong and windows.

A hop is the exchange between two neighbouring stages. `stage-chain` measures it as a steady 1F1B
uses it: an activation up and a gradient down at the same time. It first measures each hop alone,
then all hops of the pipeline together, and finally every message of a schedule in its order, with
passes that take no time.
"""

from __future__ import annotations

import random
import time
from functools import partial

from bench.interconnect.cases import COMM, NAME, TAG, Case, Posted, Setup, mismatch, pattern
from bench.interconnect.compiled import ACK_BYTES
from mpipar.pipeline.instructions import lower
from mpipar.pipeline.schedules.catalog import make_schedule

LATE_SECONDS = 0.01
MOST_MESSAGES = 4096  # of a rank at once with distinct contents


class BareNames:
    """mpi4py's own calls under the names that `mpipar.comm` has for them.

    known(x): x in a type that MPI knows; None if MPI knows x itself.
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
        self.ack = self.ops.zeros((max(1, ACK_BYTES // self.item),), label="buffers")
        wire, self.label = (
            (self.comm, (NAME,))
            if via == COMM
            else (BareNames(self.mpi, self.known if self.item == 2 else None), ())
        )
        self.isend, self.irecv = wire.isend, wire.irecv
        self.send, self.recv = wire.send, wire.recv

    def counts(self) -> tuple[int, int]:
        """Return how many messages this rank sends and receives in one iteration."""
        raise AssertionError("each case says how many")

    def sources(self) -> list[int]:
        """Return the sender of each message that this rank receives."""
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
            found += mismatch(
                self.ops, y, expected, f"rank {self.index}, message {place} from rank {source}"
            )
        return found

    def volume(self):
        size = self.elements() * self.item
        sends, receives = (count * size // self.per_sample for count in self.counts())
        return {"size_bytes": size, "bytes_in": sends, "bytes_out": receives, "wire_bytes": sends}


class Exchange(Messages):
    """Messages distinguished by tags, where each rank also knows all others' messages."""

    def parts(self, index: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return (peer, tag) of each message that a rank sends, and of each that it receives."""
        raise AssertionError("each case says which")

    def counts(self):
        self.sends, self.receives = self.parts(self.index)
        return len(self.sends), len(self.receives)

    def sources(self):
        return [(peer, self.parts(peer)[0].index((self.index, tag))) for peer, tag in self.receives]

    def volume(self):
        volume = super().volume()
        return volume | {"counted_bytes": max(volume["bytes_in"], volume["bytes_out"])}


class Pattern(Posted, Exchange):
    """Messages that are all posted at once."""

    def prepare(self):
        super().prepare()
        self.calls = [
            partial(self.irecv, y, peer, tag, *self.label)
            for y, (peer, tag) in zip(self.ys, self.receives, strict=True)
        ]
        self.calls += [
            partial(self.isend, x, peer, tag, *self.label)
            for x, (peer, tag) in zip(self.xs, self.sends, strict=True)
        ]

    def post(self):
        return [call() for call in self.calls]


# Who sends to whom: (the rank's place, ranks) -> (peers that it sends to, peers that send to it).
PEERS = {
    "ring": lambda index, ranks: ([(index + 1) % ranks], [(index - 1) % ranks]),
    "fan-in": lambda index, ranks: ([0], []) if index else ([], [*range(1, ranks)]),
    "fan-out": lambda index, ranks: ([], [0]) if index else ([*range(1, ranks)], []),
}


def pattern_of(name: str, peers) -> type[Pattern]:
    """Return the class of a row of PEERS; the size is that of one message."""

    def parts(case, index):
        return tuple([(peer, TAG) for peer in some] for some in peers(index, case.ranks))

    return type(name, (Pattern,), {"name": name, "parts": parts})


PATTERNS = {name: pattern_of(name, peers) for name, peers in PEERS.items()}


class Bisection(Messages):
    """Random pairs, drawn for each iteration: one rank of each pair sends to the other.

    Every rank is in one pair; with an odd number of ranks one rests. It reveals links that many
    pairs share, whatever the order of the ranks. With --sync none the draw is timed too. Source:
    Hoefler, Schneider, Lumsdaine, Multistage switches are not crossbars, CLUSTER 2008 (effective
    bisection bandwidth).
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
        """Check that, if rank 0 comes late, no other rank leaves before it."""
        start = time.perf_counter()
        self.mpi.Barrier()
        if self.index == 0:
            time.sleep(LATE_SECONDS)
        self.run()
        left = time.perf_counter() - start
        return [] if left >= LATE_SECONDS else [f"rank {self.index} left before rank 0 came"]


def hops_of(schedule: str, pp_size: int) -> list[tuple[int, int]]:
    """Return pairs of pipeline ranks that exchange activations; interleaving adds (last, first)."""
    hops = [(place, place + 1) for place in range(pp_size - 1)]
    return [*hops, (pp_size - 1, 0)] if schedule == "interleaved" else hops


class Hops(Pattern):
    """Both messages of each of the given hops, all at once."""

    name = "stage-chain"

    def __init__(self, setup: Setup, via: str, hops=()):
        self.hops = list(enumerate(hops))
        super().__init__(setup, via)

    def parts(self, index):
        messages = [
            (source, target, TAG + 2 * number + direction)
            for number, (low, high) in self.hops
            for direction, (source, target) in enumerate(((low, high), (high, low)))
        ]
        return (
            [(target, tag) for source, target, tag in messages if source == index],
            [(source, tag) for source, target, tag in messages if target == index],
        )


def microbatches(pp_size: int) -> int:
    """Return a number of at least 8, a multiple of the ranks, as interleaving needs it."""
    return pp_size * max(2, -(-8 // pp_size))


def program(schedule, pp_rank: int) -> list[tuple[str, int, int]]:
    """Return the actions of a rank: (recv, peer, tag), (send, peer, tag), (wait, -1, tag).

    A tag names a message: its direction, the stage that it enters, its microbatch.
    """

    def tag_of(direction: str, stage: int, mb: int) -> int:
        return TAG + (stage * schedule.num_microbatches + mb) * 2 + (direction == "B")

    steps, to_come = [], set()
    for kind, stage, mb in (instr[:3] for instr in lower(schedule, pp_rank)):
        if kind in ("RECV_F", "RECV_B"):
            away = -1 if kind == "RECV_F" else 1
            to_come.add(tag_of(kind[-1], stage, mb))
            steps.append(
                ("recv", schedule.stage_to_rank[stage + away], tag_of(kind[-1], stage, mb))
            )
        elif kind in ("SEND_F", "SEND_B"):
            to = stage + 1 if kind == "SEND_F" else stage - 1
            steps.append(("send", schedule.stage_to_rank[to], tag_of(kind[-1], to, mb)))
        elif kind in ("F", "B") and tag_of(kind, stage, mb) in to_come:
            steps.append(("wait", -1, tag_of(kind, stage, mb)))
    return steps


class Program(Exchange):
    """All messages of one step of a schedule; a pass waits for its message and takes no time."""

    name = "stage-chain"

    def __init__(self, setup: Setup, via: str, schedule_name="1f1b"):
        self.name = f"stage-chain {schedule_name}"
        pp_size = setup.comm.size
        self.schedule = make_schedule(schedule_name, pp_size, microbatches(pp_size))
        self.steps = program(self.schedule, setup.comm.index)
        super().__init__(setup, via)

    def parts(self, index):
        steps = program(self.schedule, index)
        return tuple(
            [(peer, tag) for step, peer, tag in steps if step == kind] for kind in ("send", "recv")
        )

    def run(self):
        xs, ys, inbox, sent = iter(self.xs), iter(self.ys), {}, []
        for step, peer, tag in self.steps:
            if step == "recv":
                inbox[tag] = self.irecv(next(ys), peer, tag, *self.label)
            elif step == "send":
                sent.append(self.isend(next(xs), peer, tag, *self.label))
            else:
                self.wait(inbox.pop(tag))
        self.wait_all(sent)
