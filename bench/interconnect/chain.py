"""The messages of a pipeline without its computing: hops between stages, and whole schedules.

A hop is the exchange between two neighbouring stages. `stage-chain` measures it as a steady 1F1B
uses it: an activation up and a gradient down at once. It measures first each hop alone, then all
hops of the pipeline together. Last comes every message of a schedule in its order, with passes that
take no time.
"""

from __future__ import annotations

from bench.interconnect.cases import Setup
from bench.interconnect.messages import TAG, Exchange, Pattern
from mpipar.pipeline.instructions import lower
from mpipar.pipeline.schedules.catalog import make_schedule


def hops_of(schedule: str, pp_size: int) -> list[tuple[int, int]]:
    """Pairs of pipeline ranks that exchange activations; interleaving adds (last, first)."""
    hops = [(place, place + 1) for place in range(pp_size - 1)]
    return [*hops, (pp_size - 1, 0)] if schedule == "interleaved" else hops


class Hops(Pattern):
    """Both messages of each of the given hops, all at once."""

    name = "stage-chain"

    def __init__(self, setup: Setup, via: str, hops=()):
        self.hops = list(enumerate(hops))
        super().__init__(setup, via)

    def parts(self, index):
        messages = [(source, target, TAG + 2 * number + direction)
                    for number, (low, high) in self.hops
                    for direction, (source, target) in enumerate(((low, high), (high, low)))]
        return ([(target, tag) for source, target, tag in messages if source == index],
                [(source, tag) for source, target, tag in messages if target == index])


def microbatches(pp_size: int) -> int:
    """At least 8, and a multiple of the ranks, which interleaving needs."""
    return pp_size * max(2, -(-8 // pp_size))


def program(schedule, pp_rank: int) -> list[tuple[str, int, int]]:
    """The actions of a rank: (recv, peer, tag), (send, peer, tag), (wait, -1, tag).

    A tag names a message: its direction, the stage that it enters, its microbatch.
    """
    def tag_of(direction: str, stage: int, mb: int) -> int:
        return TAG + (stage * schedule.num_microbatches + mb) * 2 + (direction == "B")

    steps, to_come = [], set()
    for kind, stage, mb in (instr[:3] for instr in lower(schedule, pp_rank)):
        if kind in ("RECV_F", "RECV_B"):
            away = -1 if kind == "RECV_F" else 1
            to_come.add(tag_of(kind[-1], stage, mb))
            steps.append(("recv", schedule.rank_of(stage + away, mb), tag_of(kind[-1], stage, mb)))
        elif kind in ("SEND_F", "SEND_B"):
            to = stage + 1 if kind == "SEND_F" else stage - 1
            steps.append(("send", schedule.rank_of(to, mb), tag_of(kind[-1], to, mb)))
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
        return tuple([(peer, tag) for step, peer, tag in steps if step == kind]
                     for kind in ("send", "recv"))

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
