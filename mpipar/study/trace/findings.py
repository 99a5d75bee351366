"""Findings: faults of a traced run, in words. A healthy run has none.

Each finding compares like with like. Pipeline ranks are compared by the FLOPs of their stages,
ranks with the others of their stage, links with the others of their axis and with a gigabit cable.
A slow rank is slow in more than one step, because once may be chance. Ranks that share cores are
slow in turn, so there neither a rank nor a link is blamed. Every pipeline has a bubble, which is a
finding only if a single microbatch at a time is in flight.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from statistics import mean, median

from mpipar import models
from mpipar.comm.grid import ISLAND
from mpipar.comm.record import COMPUTE, PASSES
from mpipar.config.model import model_config
from mpipar.models.split import balanced_layers, stage_flops
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.run.trace.trace_file import RankTrace, Trace
from mpipar.study.schedules.bubble import measured_costs
from mpipar.study.schedules.simulate import Costs, simulate
from mpipar.study.trace import pop
from mpipar.study.trace.causes import Cause, Cost
from mpipar.study.trace.segments import Segment, by_kind
from mpipar.study.trace.waits import Call, Event, Waits

NOTABLE = 1.2  # times the mean, or the replicas' work
SLOW = 1.5  # times as long per FLOP as other stages; stages differ in more than FLOPs
LARGE_SHARE = 0.05  # of the traced time, for an uneven stage or a link to matter
MOST_PER_RANK = 4  # microbatches per pipeline rank; more gain little
LEAST_LENGTHS = 3  # transfers that show the travel time of data; fewer may be chance
SLOW_LINK = 2.0  # times as long per byte as the axis's other links
CABLE_NS_PER_BYTE = 10  # a gigabit cable, with what a protocol costs
CABLE_NS = 0.5e6  # a message's own delay on a bad network
AFTER_NS = 1e6  # a transfer that starts when its sender is free again ends within this time


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
    spent = {
        place: min(median(work.steps[rank.world_rank].values()) for rank in members)
        for place, members in places.items()
    }
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
    now, even = (pop.simulated(trace, even=one).makespan for one in (False, True))
    lost = float(now - even) * 1e3
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


# --- slow links: compared with the axis's others, and with a gigabit cable


@dataclass
class Link:
    """The transfers of one link: from a sender to a receiver, or inside a group.

    lengths: nanoseconds that the data travelled, where a rank waited for half of that; sizes: the
    bytes of these. free: when the last of them had arrived.
    """

    axis: str
    ranks: tuple[int, ...]
    message: bool
    events: list[Event] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    free: int = 0

    @property
    def length(self) -> float:
        """Typical travel time of data in nanoseconds; a few long transfers have no influence."""
        return median(self.lengths)

    @property
    def quick(self) -> float:
        """Nanoseconds of its quick transfers: on a slow link these are slow too."""
        return sorted(self.lengths)[len(self.lengths) // 8]

    @property
    def size(self) -> float:
        """Typical bytes of a transfer, among those whose length is known."""
        return median(self.sizes)

    def text(self) -> str:
        """Return which link, what it carried, and how long it took."""
        ranks = (" -> " if self.message else ", ").join(map(str, self.ranks))
        return (
            f"{self.axis} {'link' if self.message else 'group'} {ranks}: {len(self.events)}"
            f" transfers of {self.size / 1024:.1f} KiB take {self.length * 1e-6:.2f} ms"
            f" each ({self.size / max(self.length, 1) * 1e3:.1f} MB/s)"
        )

    def lost(self, trace: Trace, waits: Waits, usual: float) -> float:
        """Return how many nanoseconds steps would save if even quick transfers were as usual."""
        saved = {
            id(call): min(call.transfer_ns, self.quick - usual)
            for event in self.events
            for call in event.calls
        }
        ends = pop.replay(trace, waits, lambda call: call.transfer_ns - saved.get(id(call), 0))
        return trace.end - max(ends)


def slow_links(trace: Trace, waits: Waits, segments: list[list[Segment]]) -> list[tuple]:
    """Return [(text, nanoseconds lost)] of the links whose transfers take too long."""
    links = [link for link in measured(waits, segments) if len(link.lengths) >= LEAST_LENGTHS]
    found = []
    for link in links:
        others = [
            one.length / one.size
            for one in links
            if one is not link and (one.axis, one.message) == (link.axis, link.message)
        ]
        usual = median(others) * link.size if others else 0.0
        cable = CABLE_NS_PER_BYTE * link.size
        if others and link.quick > max(SLOW_LINK * usual, CABLE_NS):
            times = link.length / max(usual, 1)
            reason = f"{times:.1f}x as long per byte as the axis's others"
        elif link.quick > CABLE_NS + cable:
            usual, reason = cable, "longer than over a gigabit cable"
        else:
            continue
        lost = link.lost(trace, waits, usual)
        share = lost / (trace.end - trace.start)
        if share >= LARGE_SHARE:
            found.append((f"{link.text()}, {reason}: {share:.0%} of the step", lost))
    return found


def measured(waits: Waits, segments: list[list[Segment]]) -> list[Link]:
    """Return every link that carried data, with the transfer times that are known."""
    links: dict[tuple, Link] = {}
    for event in waits.events:
        if not event.calls[0].record.payload_bytes:
            continue
        message = event.operation == "message"
        link = links.setdefault(
            (event.axis, event.ranks, message), Link(event.axis, event.ranks, message)
        )
        sent = event.calls[0].record.posted_ns if message else event.arrival_ns
        first = _first_to_leave(event)
        start, end = max(sent, link.free), first.record.done_ns
        # Data that arrived before any rank waited for it leaves no arrival time.
        seen = 0 < end - start <= 2 * first.transfer_ns
        if seen and not (message and _stood_still(start, end, segments[event.ranks[0]])):
            link.lengths.append(end - start)
            link.sizes.append(event.calls[0].record.payload_bytes)
        link.events.append(event)
        link.free = max(link.free, end)
    return list(links.values())


def _first_to_leave(event: Event) -> Call:
    """Return the receiver of a message; of a collective, the member that shows the travel time."""
    receivers = event.calls[1:] if event.operation == "message" else event.calls
    return min(receivers, key=lambda call: call.record.done_ns)


def _stood_still(start: int, end: int, sender: list[Segment]) -> bool:
    """Return whether a message moved only when its sender had finished a pass and called MPI again.

    MPI moves nothing until it is called, so that says nothing about the link.
    """
    first = bisect_right(sender, start, key=lambda one: one.end)
    last = bisect_left(sender, end, key=lambda one: one.start)
    computing = [one for one in sender[first:last] if one.kind in COMPUTE]
    return (
        bool(computing)
        and 0 <= end - computing[-1].end < AFTER_NS
        and (computing[-1].end - max(computing[-1].start, start) > (end - start) / 2)
    )
