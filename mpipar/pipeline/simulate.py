"""How long a schedule takes: start and end of each instruction, given the costs of passes and hops.

A rank runs its instructions one after the other, each as soon as its data has arrived; sending
costs the sender nothing and links do not queue. Arithmetic is that of the costs: exact for ints
and Fractions.
"""

from collections import deque
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from mpipar.pipeline.check import check
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.instructions import Instr, Schedule, is_compute, is_remote, parts


class Span(NamedTuple):
    """When one instruction ran; REDUCE_GRAD and wire instructions take no time."""

    instr: Instr
    start: Real
    end: Real


@dataclass(frozen=True)
class Timeline:
    """The simulated step, by pipeline rank.

    spans: every instruction in program order. peak_stash: most chunk-activations held at once, and
    peak_stash_bytes what they take. messages: sent in the step.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    peak_stash: tuple[int, ...]
    peak_stash_bytes: tuple[Real, ...]
    messages: tuple[int, ...]

    @property
    def makespan(self) -> Real:
        """From the first pass anywhere to the end of the last pass anywhere."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def busy(self) -> tuple[Real, ...]:
        """Time each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def busy_share(self) -> tuple[float, ...]:
        """Share of the step that each rank computes."""
        return tuple(float(busy / self.makespan) for busy in self.busy)

    @property
    def global_bubble(self) -> tuple[Real, ...]:
        """Time each rank does not compute, from the first pass anywhere to the last anywhere."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def span_bubble(self) -> tuple[Real, ...]:
        """Time each rank does not compute between its own first and last pass."""
        return tuple(
            spans[-1].end - next(span.start for span in spans if is_compute(span.instr)) - busy
            for spans, busy in zip(self.spans, self.busy, strict=True)
        )

    @property
    def bubble_share(self) -> float:
        """Idle time of all ranks divided by p times the makespan."""
        return float(1 - sum(self.busy) / (len(self.spans) * self.makespan))


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a schedule; ScheduleError if it cannot run, UsageError on wrong costs."""
    report = check(schedule)
    run = _Run(schedule, costs)
    runnable = deque(range(schedule.pp_size))
    while runnable:
        runnable.extend(run.advance(runnable.popleft()))
    spans = tuple(map(tuple, run.spans))
    peak_bytes = tuple(peak_stash_bytes(schedule, costs))
    return Timeline(schedule, spans, report.peak_stash, peak_bytes, report.messages)


class _Run:
    """The state of a simulation: how far each rank has come, and when each result arrives."""

    def __init__(self, schedule: Schedule, costs: Costs):
        self.schedule, self.hop = schedule, costs.hop()
        f, i, w = (costs.by_stage(name, schedule.num_stages) for name in "fiw")
        b = [cost_i + cost_w for cost_i, cost_w in zip(i, w, strict=True)]
        self.cost = {"F": f, "B": b, "I": i, "W": w}
        self.overlap = costs.overlap
        self.arrived = {}  # (direction, stage, mb) of a remote input: time of arrival
        self.waiting = {}  # the same: the rank that waits for it
        self.clock = [0] * schedule.pp_size
        self.spans = [[] for _ in range(schedule.pp_size)]

    def advance(self, pp_rank: int) -> list[int]:
        """Run a rank until it waits or ends; returns the ranks that its results have woken."""
        spans, clock, woken = self.spans[pp_rank], self.clock[pp_rank], []
        program = self.schedule.programs[pp_rank]
        for position in range(len(spans), len(program)):
            instr = program[position]
            start = clock
            if is_compute(instr):
                inputs = [key for part in parts(instr) for key in self.inputs(pp_rank, *part)]
                missing = [key for key in inputs if key not in self.arrived]
                if missing:
                    self.waiting[missing[0]] = pp_rank
                    break
                start = max([clock, *map(self.arrived.pop, inputs)])
                clock = start + self.duration(instr)
            for key in self.outputs(pp_rank, instr):
                self.arrived[key] = clock + self.hop
                if key in self.waiting:
                    woken.append(self.waiting.pop(key))
            spans.append(Span(instr, start, clock))
        self.clock[pp_rank] = clock
        return woken

    def inputs(self, pp_rank: int, kind: str, stage: int, mb: int) -> list[tuple[str, int, int]]:
        """The messages that a pass waits for."""
        if kind == "F" and is_remote(self.schedule, pp_rank, stage - 1, mb):
            return [("F", stage, mb)]
        if kind in ("B", "I") and is_remote(self.schedule, pp_rank, stage + 1, mb):
            return [("B", stage, mb)]
        return []

    def outputs(self, pp_rank: int, instr: Instr) -> list[tuple[str, int, int]]:
        """The messages that leave at the end of an instruction: a SEND where wired, else a pass."""
        if self.schedule.wired:
            step = {"SEND_F": ("F", instr.stage + 1), "SEND_B": ("B", instr.stage - 1)}
            return [(*step[instr.kind], instr.mb)] if instr.kind in step else []
        return [
            ("F", stage + 1, mb) if kind == "F" else ("B", stage - 1, mb)
            for kind, stage, mb in parts(instr)
            if kind in ("F", "B", "I")
            and is_remote(self.schedule, pp_rank, stage + 1 if kind == "F" else stage - 1, mb)
        ]

    def duration(self, instr: Instr) -> Real:
        """Cost of a compute instruction."""
        total = sum(self.cost[kind][stage] for kind, stage, _ in parts(instr))
        return total * self.overlap if instr.kind == "OVERLAP_F_B" else total


def peak_stash_bytes(schedule: Schedule, costs: Costs) -> list[Real]:
    """The most bytes each rank keeps for backward passes at once."""
    stash = costs.by_stage("stash_bytes", schedule.num_stages)
    kept = costs.by_stage("kept_bytes", schedule.num_stages)
    peaks = []
    for program in schedule.programs:
        held = peak = 0
        for instr in program:
            for kind, stage, _ in parts(instr):
                if kind == "F":
                    held += stash[stage]
                    peak = max(peak, held)
                elif kind == "I":
                    held += kept[stage] - stash[stage]
                elif kind in ("B", "W"):
                    held -= stash[stage] if kind == "B" else kept[stage]
        peaks.append(peak)
    return peaks
