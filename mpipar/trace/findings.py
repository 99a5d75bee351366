"""What is wrong with a traced run, in words: uneven stages, a heavy head, slow ranks, slow links.

Each finding compares like with like. Pipeline ranks' computing times are compared with the FLOPs of
their stages. Ranks are compared with the others of their stage, and links with the others of their
axis.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import mean, median

from mpipar import models
from mpipar.comm.record import COMPUTE, PASSES
from mpipar.config.model import model_config
from mpipar.models.stage import balanced_layers, stage_flops
from mpipar.trace.segments import Segment, by_kind
from mpipar.trace.trace_file import Trace
from mpipar.trace.waits import POINT_TO_POINT, Waits

NOTABLE = 1.2  # times the mean, or the replicas' work
SLOW_LINK = 2.0  # times as long per byte as the axis's other links
LARGE_SHARE = 0.05  # of all ranks' time, for a link to matter


@dataclass(frozen=True)
class Finding:
    """A problem that a trace shows.

    kind: uneven stage, heavy head, slow rank, slow link, or transfer. The last is a long transfer
    on a link that has no other to compare with. lost_ms: the approximate loss per step.
    """

    kind: str
    text: str
    lost_ms: float


def find(trace: Trace, waits: Waits, segments: list[list[Segment]]) -> list[Finding]:
    """All findings, the costliest first."""
    found = stages(trace, segments) + replicas(trace, segments) + links(trace, waits, segments)
    return sorted(found, key=lambda finding: -finding.lost_ms)


def work_ms(trace: Trace, segments: list[list[Segment]]) -> list[float]:
    """Milliseconds per step that each rank computes in passes, without blocked time."""
    return [sum(_passes_ns(own).values()) * 1e-6 / trace.num_steps for own in segments]


def stages(trace: Trace, segments: list[list[Segment]]) -> list[Finding]:
    """The pipeline rank that computes most, if that is notably more than the mean, and why."""
    places = sorted({rank.place["pp"] for rank in trace.ranks})
    if len(places) == 1:
        return []
    work = work_ms(trace, segments)
    model, split = model_config(trace.meta["model"]), trace.meta["stage_layers"]
    units = models.model_of(model).unit_flops(model)
    least, expected, headless = {}, {}, {}
    for place in places:
        members = [rank for rank in trace.ranks if rank.place["pp"] == place]
        # The fastest replica counts: a slow one among them is another finding.
        least[place] = min(work[rank.world_rank] for rank in members)
        costs = [stage_flops(units, split, span.stage)
                 for span in members[0].spans if span.kind == "F"]
        expected[place] = sum(map(sum, costs))
        headless[place] = sum(blocks for blocks, _ in costs)
    slowest = max(places, key=least.get)

    def ratio(values):
        return values[slowest] / max(mean(values.values()), 1e-9)

    if ratio(least) < NOTABLE:
        return []
    ranks = [rank for rank in trace.ranks if rank.place["pp"] == slowest]
    named = "; ".join(trace.meta["stages"][stage] for stage in ranks[0].stages)
    lost = least[slowest] - mean(least.values())
    measured = (f"pipeline rank {slowest} (stage {named}) computes {least[slowest]:.1f} ms per"
                f" step, {ratio(least):.1f}x the mean")
    if ratio(expected) - 1 < (ratio(least) - 1) / 2:
        return [Finding("slow rank", f"{measured}, but only {ratio(expected):.1f}x of the FLOPs are"
                        f" there: {_names(ranks)} slow, or late inside a pass", lost)]
    held = [next(rank.stages for rank in trace.ranks if rank.place["pp"] == place)
            for place in places]
    balanced = balanced_layers(model.layers, units, held)
    cure = "" if list(balanced) == list(split) else (
        f"; balanced by FLOPs: --stage-layers {','.join(map(str, balanced))}")
    if ratio(headless) < NOTABLE:
        share = 1 - headless[slowest] / expected[slowest]
        return [Finding("heavy head", f"{measured}: the head is {share:.0%} of its FLOPs{cure}",
                        lost)]
    return [Finding("uneven stage",
                    f"{measured}; by FLOPs {ratio(expected):.1f}x{cure}", lost)]


def replicas(trace: Trace, segments: list[list[Segment]]) -> list[Finding]:
    """Ranks that compute notably longer than the others of their stage, which do equal work.

    They do so in every traced step: once may be chance.
    """
    work, found = work_ms(trace, segments), []
    steps = [_passes_ns(own) for own in segments]
    for rank in trace.ranks:
        mates = [other.world_rank for other in trace.ranks
                 if other.place["pp"] == rank.place["pp"] and other is not rank]
        if not mates:
            continue
        own, others = work[rank.world_rank], [work[mate] for mate in mates]
        if all(length > NOTABLE * median(steps[mate][step] for mate in mates)
               for step, length in steps[rank.world_rank].items()):
            found.append(Finding(
                "slow rank", f"{_names([rank])} computes {own:.1f} ms per step, the others of its"
                f" stage {median(others):.1f} ms", own - median(others)))
    return found


def _passes_ns(own: list[Segment]) -> Counter:
    """{step: nanoseconds that a rank computes in passes}."""
    sums: Counter = Counter()
    for one in own:
        if one.kind in PASSES:
            sums[one.span.step] += one.length
    return sums


def links(trace: Trace, waits: Waits, segments: list[list[Segment]]) -> list[Finding]:
    """Links (sender to receiver, or group) whose transfers take long beside the axis's others."""
    spent, volume, counts = defaultdict(int), defaultdict(int), defaultdict(int)
    hidden = defaultdict(int)
    for event in waits.events:
        payload = event.calls[0].record.payload_bytes
        if not payload:
            continue
        message = event.calls[0].record.operation in POINT_TO_POINT
        key = (event.axis, event.ranks, message)
        slow = [call.transfer_ns for call in event.calls]
        spent[key] += slow[1] if message else sum(slow) // len(slow)
        volume[key] += payload
        counts[key] += 1
        if message:
            end = event.calls[1].record.done_ns
            hidden[key] += _computing(segments[event.ranks[0]], end - slow[1], end)
    found = []
    for key, time in spent.items():
        axis, ranks, message = key
        others = [spent[other] / volume[other] for other in spent
                  if other != key and (other[0], other[2]) == (axis, message)]
        share = time * (1 if message else len(ranks)) / (
            (trace.end - trace.start) * len(trace.ranks))
        pace, usual = time / volume[key], median(others) if others else 0.0
        if share < LARGE_SHARE or (others and pace < SLOW_LINK * usual):
            continue
        arrow = " -> ".join(map(str, ranks)) if message else ", ".join(map(str, ranks))
        text = (f"{axis} {'link' if message else 'group'} {arrow}: {counts[key]} transfers of"
                f" {volume[key] / counts[key] / 1024:.1f} KiB take"
                f" {time / counts[key] * 1e-6:.2f} ms each ({1e3 / pace:.0f} MB/s)")
        if others:
            text += f", {pace / max(usual, 1e-9):.1f}x as long per byte as the axis's others"
        if message and hidden[key] > time / 2:
            text += ("; most of it while the sender computes, and MPI moves nothing until it"
                     " is called")
        kind = "slow link" if others else "transfer"
        found.append(Finding(kind, text, time * 1e-6 / trace.num_steps))
    return found


def _computing(segments: list[Segment], start: int, end: int) -> int:
    """Nanoseconds of [start, end) that a rank computes."""
    first = bisect_right(segments, start, key=lambda one: one.end)
    last = bisect_left(segments, end, key=lambda one: one.start)
    sums = by_kind(segments[first:last], start, end)
    return sum(sums[kind] for kind in COMPUTE)


def _names(ranks) -> str:
    shown = ", ".join(str(rank.world_rank) for rank in ranks)
    hosts = ", ".join(sorted({rank.host for rank in ranks}))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown} on {hosts}"
