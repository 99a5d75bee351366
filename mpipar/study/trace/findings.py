"""Findings: faults of a traced run, in words. A healthy run has none.

Each finding compares like with like. Pipeline ranks are compared by the FLOPs of their stages,
ranks with the others of their stage, links with the others of their axis and with a gigabit cable.
A slow rank is slow in more than one step, because once may be chance. Ranks that share cores are
slow in turn, so there neither a rank nor a link is blamed. Every pipeline has a bubble, which is a
finding only if a single microbatch at a time is in flight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, median

from mpipar import models
from mpipar.comm.grid import ISLAND
from mpipar.comm.record import PASSES
from mpipar.config.model import model_config
from mpipar.models.split import balanced_layers, stage_flops
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.run.trace.trace_file import RankTrace, Trace
from mpipar.study.schedules.bubble import measured_costs
from mpipar.study.schedules.simulate import Costs, simulate
from mpipar.study.trace import pop
from mpipar.study.trace.causes import Cause, Cost
from mpipar.study.trace.links import slow_links
from mpipar.study.trace.segments import Segment, by_kind
from mpipar.study.trace.waits import Waits

NOTABLE = 1.2  # times the mean, or the replicas' work
SLOW = 1.5  # times as long per FLOP as other stages; stages differ in more than FLOPs
LARGE_SHARE = 0.05  # of a step, for uneven stages to matter
MOST_PER_RANK = 4  # microbatches per pipeline rank; more gain little


@dataclass(frozen=True)
class Finding:
    """A problem that a trace shows: uneven stage, slow rank, slow link or one active rank.

    lost_ms: the approximate loss per step.
    """

    kind: str
    text: str
    lost_ms: float


def find(
    trace: Trace, waits: Waits, segments: list[list[Segment]], costs: dict[Cause, Cost]
) -> list[Finding]:
    """Return all findings, the costliest first."""
    work = Passes(trace, segments, costs)
    found = stages(work) + one_at_a_time(trace)
    if not trace.crowded():
        found += replicas(work) if trace.num_steps > 1 else []
        found += [
            Finding("slow link", text, time * 1e-6 / trace.num_steps)
            for text, time in slow_links(trace, waits, segments)
        ]
    return sorted(found, key=lambda finding: -finding.lost_ms)


class Passes:
    """What the ranks of a trace compute in their passes: as measured, and in FLOPs."""

    def __init__(self, trace: Trace, segments: list[list[Segment]], costs: dict[Cause, Cost]):
        self.trace, self.costs = trace, costs
        # by rank: {step: milliseconds of computing in passes, without blocked time}
        self.steps = []
        for own in segments:
            passes = (one for one in own if one.kind in PASSES)
            sums = by_kind(passes, kind=lambda one: one.span.step)
            self.steps.append({step: sums[step] * 1e-6 for step, *_ in trace.ranks[0].steps})
        self.split = trace.meta["stage_layers"]
        self.units = models.unit_flops(model_config(trace.meta["model"]))

    def usual(self, rank: RankTrace) -> float:
        """Return the milliseconds that a rank computes in a typical step."""
        return median(self.steps[rank.world_rank].values())

    def flops(self, rank: RankTrace) -> tuple[float, float]:
        """Return the FLOPs (of the blocks, of the head) in all traced forward passes of a rank."""
        stages = stage_flops(self.units, self.split)
        costs = [stages[one.stage] for one in rank.spans if one.kind == "F" and one.stage >= 0]
        return sum(blocks for blocks, _ in costs), sum(head for _, head in costs)

    def most_of_it(self, rank: RankTrace) -> str:
        """Return the pass, and the layer if known, for which others waited longest, if any did."""
        named = (
            f", most of it in the {cause.what}"
            for cause in self.costs
            if cause.kind == "compute" and cause.ranks == (rank.world_rank,)
        )
        return next(named, "")


def stages(work: Passes) -> list[Finding]:
    """Return the pipeline rank that computes most, if notably more than the mean, and why."""
    trace = work.trace
    places: dict[int, list[RankTrace]] = {}
    for rank in trace.ranks:
        places.setdefault(rank.place["pp"], []).append(rank)
    # The fastest replica counts, since a slow one is another finding.
    spent = {place: min(map(work.usual, members)) for place, members in places.items()}
    blocks = {place: work.flops(members[0])[0] for place, members in places.items()}
    flops = {place: max(sum(work.flops(members[0])), 1) for place, members in places.items()}
    slowest = max(places, key=spent.__getitem__)

    def ratio(values):
        return values[slowest] / max(mean(values.values()), 1e-9)

    if len(places) == 1 or ratio(spent) < NOTABLE:
        return []
    ranks = places[slowest]
    named = "; ".join(trace.meta["stages"][stage] for stage in ranks[0].stages)
    measured = (
        f"pipeline rank {slowest} (stage {named}) computes {spent[slowest]:.1f} ms per"
        f" step, {ratio(spent):.1f}x the mean"
    )
    if ratio(flops) - 1 < (ratio(spent) - 1) / 2:
        others = [spent[one] / flops[one] for one in places if one != slowest and flops[one] > 1]
        due = flops[slowest] * median(others) if others else math.inf
        if spent[slowest] < SLOW * due or trace.num_steps == 1 or trace.crowded():
            return []
        text = (
            f"{measured}, but only {ratio(flops):.1f}x of the FLOPs are there: {_names(ranks)}"
            f" slow, or late inside a pass{work.most_of_it(ranks[0])}"
        )
        return [Finding("slow rank", text, spent[slowest] - due)]
    lost = pop.lost_by_uneven_stages(trace)
    if lost < LARGE_SHARE * (trace.end - trace.start) * 1e-6 / trace.num_steps:
        return []
    text = f"{measured}; by FLOPs {ratio(flops):.1f}x"
    if ratio(blocks) < NOTABLE:
        text += f", of which the head is {1 - blocks[slowest] / flops[slowest]:.0%}"
    balanced = balanced_layers(work.units, [held[0].stages for _, held in sorted(places.items())])
    if list(balanced) != list(work.split):
        text += f"; balanced by FLOPs: --stage-layers {','.join(map(str, balanced))}"
    return [Finding("uneven stage", text, lost)]


def replicas(work: Passes) -> list[Finding]:
    """Return the ranks that in every step compute notably longer than the others of their stage."""
    found = []
    for rank in work.trace.ranks:
        own, mates = (
            work.steps[rank.world_rank],
            [
                work.steps[other.world_rank]
                for other in work.trace.ranks
                if other.place["pp"] == rank.place["pp"] and other is not rank
            ],
        )
        if mates and all(
            length > NOTABLE * median(mate[step] for mate in mates) for step, length in own.items()
        ):
            mine, theirs = mean(own.values()), median(mean(mate.values()) for mate in mates)
            text = (
                f"{_names([rank])} computes {mine:.1f} ms per step, the others of its"
                f" stage {theirs:.1f} ms{work.most_of_it(rank)}"
            )
            found.append(Finding("slow rank", text, mine - theirs))
    return found


def one_at_a_time(trace: Trace) -> list[Finding]:
    """Return a finding if no two ranks ever compute at once, with a better schedule's step."""
    schedule = trace.schedule()
    size, count = schedule.pp_size, schedule.num_microbatches
    timeline = simulate(schedule, Costs())
    if size == 1 or sum(timeline.busy) > timeline.makespan or not pop.whole_steps(trace):
        return []
    facts = pop.pass_facts(trace)
    now = mean(max(fact["pipeline"][step] for fact in facts) for step in facts[0]["pipeline"])
    bubble = 1 - mean(row[1] for row in pop.pipeline_bubble(trace))
    text = (
        f"bubble {bubble:.0%}: one of {size} pipeline ranks is active at a time, because one"
        " microbatch is in flight"
    )
    sizes = trace.meta["layout"]
    rows = trace.meta["batch_size"] // (sizes["dp"] * sizes.get(ISLAND, 1))
    parts = 1 if count > 1 else math.gcd(rows, MOST_PER_RANK * size)
    if count * parts == 1:
        text += "; a batch of one row for each replica cannot be cut into more"
        return [Finding("one active rank", text, 0.0)]
    costs = measured_costs(facts, schedule.num_stages)
    whole = {
        name: tuple(
            sum(getattr(costs, name)[stage] for stage in schedule.stages_by_rank[place]) / parts
            for place in range(size)
        )
        for name in "fiw"
    }
    better = make_schedule("1f1b", size, count * parts)
    then = float(simulate(better, Costs(**whole)).makespan)
    cut = f" cut into {count * parts} microbatches" if parts > 1 else ""
    text += f"; 1f1b with these passes{cut} would take {then * 1e3:.1f} ms, not {now * 1e3:.1f}"
    return [Finding("one active rank", text, max(0.0, (now - then) * 1e3))]


def _names(ranks: list[RankTrace]) -> str:
    shown = ", ".join(str(rank.world_rank) for rank in ranks)
    hosts = ", ".join(sorted({rank.host for rank in ranks}))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown} on {hosts}"
