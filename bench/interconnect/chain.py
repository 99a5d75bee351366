"""The messages of a pipeline without its computing: hops between stages, and whole schedules.

A hop is the exchange between two neighbouring stages. `stage-chain` measures it as a steady 1F1B
uses it: an activation up and a gradient down at once. It measures first each hop alone, then all
hops of the pipeline together. Last comes every message of a schedule in its order, with passes that
take no time.
"""

from __future__ import annotations

from bench.interconnect.cases import Posted, Setup
from bench.interconnect.messages import TAG, Messages
from mpipar.pipeline.instructions import lower
from mpipar.pipeline.schedules.catalog import make_schedule


def hops_of(schedule: str, pp_size: int) -> list[tuple[int, int]]:
    """Pairs of pipeline ranks that exchange activations; interleaving adds (last, first)."""
    hops = [(place, place + 1) for place in range(pp_size - 1)]
    return [*hops, (pp_size - 1, 0)] if schedule == "interleaved" else hops


class Hops(Posted, Messages):
    """Both messages of each of the given hops, all at once."""

    name = "stage-chain"

    def __init__(self, setup: Setup, via: str, hops=()):
        self.hops = list(enumerate(hops))
        super().__init__(setup, via)

    def parts(self, index: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(peer, tag) of each message that a rank sends, and of each that it receives."""
        messages = [(source, target, TAG + 2 * number + direction)
                    for number, (low, high) in self.hops
                    for direction, (source, target) in enumerate(((low, high), (high, low)))]
        return ([(target, tag) for source, target, tag in messages if source == index],
                [(source, tag) for source, target, tag in messages if target == index])

    def counts(self):
        self.sends, self.receives = self.parts(self.index)
        return len(self.sends), len(self.receives)

    def sources(self):
        return [(peer, self.parts(peer)[0].index((self.index, tag)))
                for peer, tag in self.receives]

    def post(self):
        pending = [self.irecv(y, peer, tag, *self.label)
                   for y, (peer, tag) in zip(self.ys, self.receives, strict=True)]
        pending += [self.isend(x, peer, tag, *self.label)
                    for x, (peer, tag) in zip(self.xs, self.sends, strict=True)]
        return pending

    def volume(self):
        volume = super().volume()
        return volume | {"counted_bytes": volume["wire_bytes"]}


def microbatches(pp_size: int) -> int:
    """At least 8, and a multiple of the ranks, which interleaving needs."""
    return pp_size * max(2, -(-8 // pp_size))


def program(schedule, pp_rank: int) -> list[tuple]:
    """The actions of a rank: ("recv" | "send", key, peer) and ("wait", key).

    A key names a message: (direction, stage that it enters, microbatch).
    """
    steps, open_keys = [], set()
    for instr in lower(schedule, pp_rank):
        kind, stage, mb = instr.kind, instr.stage, instr.mb
        if kind in ("RECV_F", "RECV_B"):
            away = -1 if kind == "RECV_F" else 1
            steps.append(("recv", (kind[-1], stage, mb), schedule.rank_of(stage + away, mb)))
            open_keys.add((kind[-1], stage, mb))
        elif kind in ("SEND_F", "SEND_B"):
            to = stage + 1 if kind == "SEND_F" else stage - 1
            steps.append(("send", (kind[-1], to, mb), schedule.rank_of(to, mb)))
        elif (kind, stage, mb) in open_keys:
            steps.append(("wait", (kind, stage, mb), -1))
    return steps


class Program(Messages):
    """All messages of one step of a schedule; a pass waits for its message and takes no time."""

    name = "stage-chain"
    schedule_name = ""

    def __init__(self, setup: Setup, via: str, schedule_name="1f1b"):
        self.name = f"stage-chain {schedule_name}"
        pp_size = setup.comm.size
        self.schedule = make_schedule(schedule_name, pp_size, microbatches(pp_size))
        self.steps = program(self.schedule, setup.comm.index)
        super().__init__(setup, via)

    def keys(self, kind: str, steps) -> list:
        return [(key, peer) for step, key, peer in steps if step == kind]

    def counts(self):
        return len(self.keys("send", self.steps)), len(self.keys("recv", self.steps))

    def sources(self):
        found = []
        for key, peer in self.keys("recv", self.steps):
            sent = [other for other, _ in self.keys("send", program(self.schedule, peer))]
            found.append((peer, sent.index(key)))
        return found

    def _tag(self, key) -> int:
        direction, stage, mb = key
        return TAG + (stage * self.schedule.num_microbatches + mb) * 2 + (direction == "B")

    def run(self):
        xs, ys, inbox, sent = iter(self.xs), iter(self.ys), {}, []
        for step, key, peer in self.steps:
            if step == "recv":
                inbox[key] = self.irecv(next(ys), peer, self._tag(key), *self.label)
            elif step == "send":
                sent.append(self.isend(next(xs), peer, self._tag(key), *self.label))
            else:
                self.wait(inbox.pop(key))
        for one in sent:
            self.wait(one)

    def volume(self):
        size = self.elements() * self.item
        sends, receives = self.counts()
        return {"size_bytes": size, "bytes_in": sends * size, "bytes_out": receives * size,
                "wire_bytes": sends * size, "counted_bytes": sends * size}
