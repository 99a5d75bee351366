"""Simulation of a schedule: start and end of each instruction, from the costs of passes and hops.

A rank runs its instructions one after another, each as soon as its data has arrived. Links have
unlimited bandwidth, sending costs the sender nothing, and every rank has a core of its own, so a
message takes one latency. Times are exact for ints and Fractions.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from mpipar.pipeline.check import check_programs, runnable_order
from mpipar.pipeline.instructions import Instr, Message, Schedule, is_compute, parts

Number = int | float | Fraction  # a time or a size; exact as long as no float is involved
STASH_CHANGE = {"F": 1, "B": -1, "W": -1}  # a stash lives until its last reader


@dataclass(frozen=True)
class Costs:
    """Times in any unit, in seconds where measured.

    f, i, w: forward, input gradient, weight gradient of one microbatch in a stage; a full backward
    is i + w. A tuple has a value per stage, a number applies to all of them. overlap: cost of
    OVERLAP_F_B divided by that of its forward and backward one after the other. latency: from the
    end of a pass until its result has arrived at another rank.
    """

    f: Number | tuple[Number, ...] = 1
    i: Number | tuple[Number, ...] = 1
    w: Number | tuple[Number, ...] = 1
    overlap: Number = 1
    latency: Number = 0

    def by_stage(self, name: str, num_stages: int) -> tuple[Number, ...]:
        """Return f, i or w of every stage."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * num_stages

    def divided(self, count: int) -> "Costs":
        """Return the costs of stages that are each 1/count of a stage of these."""
        share = Fraction(1, count)
        return replace(self, **{name: getattr(self, name) * share for name in "fiw"})


class Span(NamedTuple):
    """The time one instruction ran; REDUCE_GRAD and wire instructions take no time."""

    instr: Instr
    start: Number
    end: Number


@dataclass(frozen=True)
class Timeline:
    """The simulated step, by pipeline rank.

    spans: every instruction in program order. peak_stash: most chunk-activations held at once.
    messages: number sent in the step.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    peak_stash: tuple[int, ...]
    messages: tuple[int, ...]

    @property
    def makespan(self) -> Number:
        """The time from the first pass anywhere to the end of the last pass anywhere."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def busy(self) -> tuple[Number, ...]:
        """The time that each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def busy_share(self) -> tuple[float, ...]:
        """The fraction of the step during which each rank computes."""
        return tuple(float(busy / self.makespan) for busy in self.busy)

    @property
    def global_bubble(self) -> tuple[Number, ...]:
        """The time that each rank idles, from the first pass anywhere to the last anywhere."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def span_bubble(self) -> tuple[Number, ...]:
        """The time that each rank idles between its own first and last pass."""
        return tuple(
            spans[-1].end - next(span.start for span in spans if is_compute(span.instr)) - busy
            for spans, busy in zip(self.spans, self.busy, strict=True)
        )

    @property
    def bubble_share(self) -> float:
        """The idle time of all ranks divided by p times the makespan."""
        return float(1 - sum(self.busy) / (len(self.spans) * self.makespan))


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Return a schedule's timeline. Raises ScheduleError if it can't run."""
    check_programs(schedule)
    f, i, w = (costs.by_stage(name, schedule.num_stages) for name in "fiw")
    backward = [one + other for one, other in zip(i, w, strict=True)]
    cost = {"F": f, "B": backward, "I": i, "W": w}
    spans: list[list[Span]] = [[] for _ in schedule.programs]
    messages = [0 for _ in schedule.programs]
    arrivals: dict[Message, Number] = {}
    for pp_rank, instr, received, sent in runnable_order(schedule):
        own = spans[pp_rank]
        start = max([own[-1].end if own else 0, *map(arrivals.pop, received)])
        duration: Number = 0
        if is_compute(instr):
            duration = sum(cost[kind][stage] for kind, stage, _ in parts(instr))
        if instr.kind == "OVERLAP_F_B":
            duration *= costs.overlap
        own.append(Span(instr, start, start + duration))
        messages[pp_rank] += len(sent)
        arrivals.update((message, own[-1].end + costs.latency) for message in sent)
    return Timeline(
        schedule,
        tuple(map(tuple, spans)),
        tuple(map(peak_stash, schedule.programs)),
        tuple(messages),
    )


def peak_stash(program: tuple[Instr, ...]) -> int:
    """Return the most chunk-activations that a rank holds at once."""
    held = peak = 0
    for instr in program:
        for kind, _, _ in parts(instr):
            held += STASH_CHANGE.get(kind, 0)
            peak = max(peak, held)
    return peak
