"""Simulation of a schedule: start and end of each instruction, from the costs of passes and hops.

A rank runs its instructions one after another, each as soon as its data has arrived. Each ordered
pair of ranks has its own link. By default links have unlimited bandwidth, sending costs the sender
nothing, and ranks share no core; a message then takes one hop, and times are exact for ints and
Fractions. `Costs` lists what else can be given.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mpipar.pipeline.check import check_programs, peak_stash
from mpipar.pipeline.instructions import WIRE_KINDS, Instr, Schedule, is_compute, lower, parts
from mpipar.study.schedules.costs import Costs, Number
from mpipar.study.schedules.events import Events, Span


@dataclass(frozen=True)
class Timeline:
    """The simulated step, by pipeline rank.

    spans: every instruction in program order. peak_stash: most chunk-activations held at once.
    peak_stash_bytes: most bytes held at once. messages: number sent in the step.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    peak_stash: tuple[int, ...]
    peak_stash_bytes: tuple[Number, ...]
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
    """Return a schedule's timeline; ScheduleError if it can't run, UsageError on bad costs."""
    check_programs(schedule)
    explicit = schedule
    if (
        costs.is_rendezvous() and not schedule.explicit_comm
    ):  # it then matters when receives are posted
        explicit = replace(
            schedule,
            explicit_comm=True,
            programs=tuple(tuple(lower(schedule, pp_rank)) for pp_rank in range(schedule.pp_size)),
        )
    events = Events(explicit, costs, durations(schedule, costs))
    events.run()
    spans = tuple(
        tuple(span for span in spans if schedule.explicit_comm or span.instr.kind not in WIRE_KINDS)
        for spans in events.spans
    )
    return Timeline(
        schedule,
        spans,
        tuple(map(peak_stash, schedule.programs)),
        tuple(peak_stash_bytes(schedule, costs)),
        tuple(events.messages),
    )


def durations(schedule: Schedule, costs: Costs) -> Callable[[Instr], Number]:
    """Return the function from a compute instruction to its cost."""
    f, i, w = (costs.by_stage(name, schedule.num_stages) for name in "fiw")
    b = [cost_i + cost_w for cost_i, cost_w in zip(i, w, strict=True)]
    cost = {"F": f, "B": b, "I": i, "W": w}

    def duration(instr: Instr) -> Number:
        total = sum(cost[kind][stage] for kind, stage, _ in parts(instr))
        return total * costs.overlap if instr.kind == "OVERLAP_F_B" else total

    return duration


def peak_stash_bytes(schedule: Schedule, costs: Costs) -> list[Number]:
    """Return the maximum number of bytes that each rank keeps for backward passes."""
    stash = costs.by_stage("stash_bytes", schedule.num_stages)
    kept = costs.by_stage("kept_bytes", schedule.num_stages)
    transient = costs.by_stage("transient_bytes", schedule.num_stages)
    peaks: list[Number] = []
    for program in schedule.programs:
        held: Number = 0
        peak: Number = 0
        for instr in program:
            for kind, stage, _ in parts(instr):
                if kind == "F":
                    held += stash[stage]
                    peak = max(peak, held)
                elif kind == "I":
                    peak = max(peak, held + transient[stage])
                    held += kept[stage] - stash[stage]
                    peak = max(peak, held)
                elif kind in ("B", "W"):
                    peak = max(peak, held + transient[stage] * (kind == "B"))
                    held -= stash[stage] if kind == "B" else kept[stage]
        peaks.append(peak)
    return peaks
