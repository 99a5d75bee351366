"""Findings: faults of a traced run, in words. A healthy run has none.

Each finding compares like with like, and in more than one step, because once may be chance.
Pipeline ranks are compared by the FLOPs of their stages, ranks with the others of their stage.
Links are compared with the others of their axis, and with a gigabit cable. What delays other ranks
outside the passes is a finding if it costs all ranks a twentieth of their time. Every pipeline has
a bubble, which is a finding only if a single microbatch at a time is in flight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import mean, median
from typing import NamedTuple

from mpipar import models
from mpipar.comm.record import PASSES
from mpipar.config.model import model_config
from mpipar.console.bubble import measured_costs
from mpipar.models.split import balanced_layers, stage_flops
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.pipeline.simulate import simulate
from mpipar.trace import pop
from mpipar.trace.causes import Cause, Causes, Cost
from mpipar.trace.links import slow_links
from mpipar.trace.segments import Segment, by_kind
from mpipar.trace.trace_file import RankTrace, Trace
from mpipar.trace.waits import Waits

NOTABLE = 1.2  # times the mean, or the replicas' work
SLOW = 1.5  # times as long per FLOP as other stages; stages differ in more than FLOPs
LARGE_SHARE = 0.05  # of all ranks' time, for a cause of waiting to matter
HOT = 1.5  # rows of an expert, over the mean of its block, in every traced step
MOST_PER_RANK = 4  # microbatches per pipeline rank; more gain little
# Kinds of causes outside the passes: name of the finding, and whether one step with it is enough.
HOLD_UP = {
    "data": ("data loading", False),
    "opt": ("optimizer", False),
    "other": ("time between spans", False),
    "save": ("checkpoint save", True),
    "gc": ("garbage collection", True),
}


@dataclass(frozen=True)
class Finding:
    """A problem that a trace shows.

    kind: uneven stage, heavy head, slow rank, hot expert, slow link, one active rank, or a name in
    HOLD_UP.
    lost_ms: the approximate loss per step.
    """

    kind: str
    text: str
    lost_ms: float


class HotExpert(NamedTuple):
    """An expert, and what its ranks cost. times: rows over the mean of its block, in the calmest
    step.

    waits: {rank: nanoseconds} that it waited for those ranks, in exchanges of rows.
    """

    layer: str
    expert: int
    times: float
    ranks: tuple[int, ...]
    waits: Counter

    @property
    def text(self) -> str:
        """The expert in words, as in `expert 3 of block 2`."""
        return f"expert {self.expert} of {self.layer.split('.')[0].replace('block', 'block ')}"


def find(
    trace: Trace,
    waits: Waits,
    segments: list[list[Segment]],
    causes: Causes,
    costs: dict[Cause, Cost],
) -> list[Finding]:
    """Return all findings, the costliest first."""
    work = Passes(trace, segments, causes)
    hot = hot_experts(trace, waits)
    found = [
        one
        for one in stages(work) + replicas(work, hot)
        if one.kind != "slow rank" or trace.num_steps > 1
    ]
    found += held_up(trace, costs) + busy_experts(trace, hot)
    found += [
        Finding("slow link", text, time * 1e-6 / trace.num_steps)
        for text, time in slow_links(trace, waits, segments)
    ]
    return sorted(found + one_at_a_time(trace), key=lambda finding: -finding.lost_ms)


class Passes:
    """What the ranks of a trace compute in their passes: as measured, and in FLOPs."""

    def __init__(self, trace: Trace, segments: list[list[Segment]], causes: Causes):
        self.trace, self.causes = trace, causes
        # With more ranks than cores, ranks also wait for cores, some longer than others.
        self.patience = 2 if trace.crowded() else 1
        # by rank: {step: nanoseconds of computing in passes}
        self.steps = [
            by_kind((one for one in own if one.kind in PASSES), kind=lambda one: one.span.step)
            for own in segments
        ]
        self.segments = segments
        self.model, self.split = model_config(trace.meta["model"]), trace.meta["stage_layers"]
        self.units = models.unit_flops(self.model)

    def ms(self, rank: RankTrace) -> float:
        """Return the milliseconds per step that a rank computes, without blocked time."""
        return self.steps[rank.world_rank].total() * 1e-6 / self.trace.num_steps

    def flops(self, rank: RankTrace) -> tuple[float, float]:
        """Return the FLOPs (of the blocks, of the head) in all traced forward passes of a rank."""
        stages = stage_flops(self.units, self.split)
        costs = [
            stages[span.stage]
            for span in rank.spans
            if span.kind == "F" and span.stage in rank.stages
        ]
        blocks, head = (sum(values) for values in zip(*costs, strict=True)) if costs else (0, 0)
        return blocks, head

    def usual(self, rank: RankTrace) -> float:
        """Return the milliseconds of a typical step, or of typical passes if ranks share cores."""
        steps = [self.steps[rank.world_rank][step] for step, *_ in rank.steps]
        if self.patience == 1:
            return median(steps) * 1e-6
        passes: dict = {}
        for one in self.segments[rank.world_rank]:
            if one.kind in PASSES:
                lengths = passes.setdefault((one.kind, one.span.stage), Counter())
                lengths[one.span] += one.length
        return (
            sum(median(lengths.values()) * len(lengths) for lengths in passes.values())
            * 1e-6
            / len(steps)
        )

    def limit(self, times: float) -> float:
        """Return a threshold, higher where ranks share cores."""
        return 1 + (times - 1) * self.patience

    def most_of_it(self, rank: RankTrace) -> str:
        """Return which pass, and which layer if known, exceeds comparable ones most."""
        works = [self.causes.work(one.world_rank, one.start, one.end) for one in self.trace.ranks]
        flops = [sum(self.flops(one)) for one in self.trace.ranks]
        own, found = rank.world_rank, Counter()
        for key, causes in works[own].items():
            if key[0] != "compute":
                continue
            for cause, length in causes.items():
                # Blocks cost the same. Whole passes are compared by their FLOPs.
                others = [
                    time * (1 if key[1][1] else flops[own] / max(flops[other], 1))
                    for other, work in enumerate(works)
                    for one, time in work.get(key, {}).items()
                    if one != cause
                ]
                if others:
                    found[cause] = length - median(others)
        ((cause, extra),) = found.most_common(1) or [(None, 0)]
        return f", most of it in the {cause.what}" if extra > 0 else ""


def stages(work: Passes) -> list[Finding]:
    """Return the pipeline rank that computes most, if notably more than the mean, and why."""
    trace = work.trace
    places: dict[int, list[RankTrace]] = {}
    for rank in trace.ranks:
        places.setdefault(rank.place["pp"], []).append(rank)
    if len(places) == 1:
        return []
    # The fastest replica counts, since a slow one is another finding.
    spent = {place: min(map(work.usual, members)) for place, members in places.items()}
    blocks = {place: work.flops(members[0])[0] for place, members in places.items()}
    flops = {place: max(sum(work.flops(members[0])), 1) for place, members in places.items()}
    slowest = max(places, key=spent.get)

    def ratio(values):
        return values[slowest] / max(mean(values.values()), 1e-9)

    if ratio(spent) < work.limit(NOTABLE):
        return []
    ranks = places[slowest]
    named = "; ".join(trace.meta["stages"][stage] for stage in ranks[0].stages)
    measured = (
        f"pipeline rank {slowest} (stage {named}) computes {spent[slowest]:.1f} ms per"
        f" step, {ratio(spent):.1f}x the mean"
    )
    if ratio(flops) - 1 < (ratio(spent) - 1) / 2:
        others = [spent[one] / flops[one] for one in places if one != slowest and flops[one] > 1]
        due = flops[slowest] * median(others) if others else None
        if due is None or spent[slowest] < work.limit(SLOW) * due:
            return []
        return [
            Finding(
                "slow rank",
                f"{measured}, but only {ratio(flops):.1f}x of the FLOPs are"
                f" there: {_names(ranks)} slow, or late inside a pass"
                f"{work.most_of_it(ranks[0])}",
                spent[slowest] - due,
            )
        ]
    lost = pop.lost_by_uneven_stages(trace)
    if lost < LARGE_SHARE * (trace.end - trace.start) * 1e-6 / trace.num_steps:
        return []
    held = [members[0].stages for _, members in sorted(places.items())]
    balanced = balanced_layers(work.units, held)
    cure = (
        ""
        if list(balanced) == list(work.split)
        else (f"; balanced by FLOPs: --stage-layers {','.join(map(str, balanced))}")
    )
    if ratio(blocks) < NOTABLE:
        share = 1 - blocks[slowest] / flops[slowest]
        return [
            Finding("heavy head", f"{measured}: the head is {share:.0%} of its FLOPs{cure}", lost)
        ]
    return [Finding("uneven stage", f"{measured}; by FLOPs {ratio(flops):.1f}x{cure}", lost)]


def replicas(work: Passes, hot: list[HotExpert]) -> list[Finding]:
    """Return the ranks that compute notably longer than the others of their stage.

    All of these do equal work, except that the holders of a hot expert have more to do.
    """
    found = []
    for rank in work.trace.ranks:
        if any(rank.world_rank in one.ranks for one in hot):
            continue
        mates = [
            other
            for other in work.trace.ranks
            if other.place["pp"] == rank.place["pp"] and other is not rank
        ]
        if mates and all(
            length
            > work.limit(NOTABLE) * median(work.steps[mate.world_rank][step] for mate in mates)
            for step, length in work.steps[rank.world_rank].items()
        ):
            own, others = work.ms(rank), median(map(work.ms, mates))
            found.append(
                Finding(
                    "slow rank",
                    f"{_names([rank])} computes {own:.1f} ms per step, the others of its"
                    f" stage {others:.1f} ms{work.most_of_it(rank)}",
                    own - others,
                )
            )
    return found


def held_up(trace: Trace, costs: dict[Cause, Cost]) -> list[Finding]:
    """Return what makes others wait outside passes in most steps; a save or collection in any."""
    all_time, found = (trace.end - trace.start) * len(trace.ranks), []
    steps = [step for step, *_ in trace.ranks[0].steps]
    for cause, cost in costs.items():
        kind, once = HOLD_UP.get(cause.kind, ("", False))
        if not kind or (len(steps) == 1 and not once):
            continue
        usual = median(cost.by_step[step] for step in steps) * len(steps)
        counted = cost.wait_ns if once else usual
        if counted < LARGE_SHARE * (2 if trace.crowded() else 1) * all_time:
            continue
        waiting, longest = cost.by_rank.most_common(1)[0]
        lost = longest * 1e-6 / trace.num_steps * counted / cost.wait_ns
        axis, name = cost.by_barrier.most_common(1)[0][0]
        rank = trace.ranks[cause.ranks[0]]
        found.append(
            Finding(
                kind,
                f"{_names([rank])}, {cause.what}: rank {waiting} waits {lost:.1f} ms"
                f" per step for it, mostly at {axis} {name}",
                lost,
            )
        )
    return found


def hot_experts(trace: Trace, waits: Waits) -> list[HotExpert]:
    """Return the hottest expert of each group of ranks that hold one.

    A rank with a popular expert computes longer than those beside it, which wait for its rows at
    the next exchange of their group. A popular expert whose rank keeps no other waiting costs
    nothing.
    """
    rows: dict = defaultdict(lambda: defaultdict(Counter))  # layer, step, expert
    holders: dict = defaultdict(set)  # layer, expert
    for rank in trace.ranks:
        for load in rank.loads:
            for expert, count in enumerate(load.rows, load.first):
                rows[load.layer][load.step][expert] += count
                holders[load.layer, expert].add(rank.world_rank)
    found: dict[tuple[int, ...], HotExpert] = {}
    for layer, steps in rows.items():
        times = {
            expert: min(own[expert] * len(own) / max(own.total(), 1) for own in steps.values())
            for expert in next(iter(steps.values()))
        }
        hottest = max(times, key=times.__getitem__)
        ranks = tuple(sorted(holders[layer, hottest]))
        if times[hottest] >= HOT and (ranks not in found or times[hottest] > found[ranks].times):
            found[ranks] = HotExpert(
                layer, hottest, times[hottest], ranks, _waits_for(waits, ranks)
            )
    return list(found.values())


def _waits_for(waits: Waits, ranks: tuple[int, ...]) -> Counter:
    """Return {rank: nanoseconds} of waiting for these ranks in their groups of experts."""
    return Counter(
        {
            own[0].rank: sum(
                call.wait_ns for call in own if call.record.axis == "expert" and call.late in ranks
            )
            for own in waits.calls
            if own
        }
    )


def busy_experts(trace: Trace, hot: list[HotExpert]) -> list[Finding]:
    """Return hot experts whose ranks make others wait, in more than one step."""
    found = []
    least = LARGE_SHARE * (2 if trace.crowded() else 1) * (trace.end - trace.start)
    for one in hot:
        longest = max(one.waits.values(), default=0)
        if trace.num_steps > 1 and longest >= least:
            lost = longest * 1e-6 / trace.num_steps
            found.append(
                Finding(
                    "hot expert",
                    f"{one.text} received {one.times:.1f} times the mean;"
                    f" {_names([trace.ranks[rank] for rank in one.ranks])} made the others wait"
                    f" {lost:.1f} ms per step",
                    lost,
                )
            )
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
    text = f"bubble {bubble:.0%}: one of {size} pipeline ranks is active at a time"
    text += ", because one microbatch is in flight"
    parts = 1 if count > 1 else _parts(trace.meta["batch_size"] // trace.meta["layout"]["dp"], size)
    if count * parts == 1:
        text += "; a batch of one row for each replica cannot be cut into more"
        return [Finding("one active rank", text, 0.0)]
    costs = measured_costs(facts, schedule.num_stages)
    stages = [schedule.stages_of(place) for place in range(size)]
    whole = Costs(
        **{
            name: tuple(sum(getattr(costs, name)[stage] for stage in own) / parts for own in stages)
            for name in "fiw"
        }
    )
    then = float(simulate(make_schedule("1f1b", size, count * parts), whole).makespan)
    how = (
        "with these passes"
        if parts == 1
        else (f"with these passes cut into {count * parts} microbatches")
    )
    text += f"; 1f1b {how} would take {then * 1e3:.1f} ms, not {now * 1e3:.1f}"
    return [Finding("one active rank", text, max(0.0, (now - then) * 1e3))]


def _parts(rows: int, size: int) -> int:
    """Return the most microbatches for a replica's rows: a power of two that divides them."""
    parts = 1
    while rows % (2 * parts) == 0 and parts < MOST_PER_RANK * size:
        parts *= 2
    return parts


def _names(ranks: list[RankTrace]) -> str:
    shown = ", ".join(str(rank.world_rank) for rank in ranks)
    hosts = ", ".join(sorted({rank.host for rank in ranks}))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown} on {hosts}"
