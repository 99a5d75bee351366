"""Causes of waiting: every wait is charged to what made the late rank late.

The late rank and the waiting one last met at some moment (see `Meetings`). What each has done since
then is compared by kind: computing, optimizer, data loading, saving, garbage collection, transfer,
time between spans, and waiting. Only what the late rank did *more* of made it late, so work that
both have done is no rank's fault, and the excess adds up to the wait. If the late rank has itself
waited more, its own waits are followed to their causes, so that a delay that travels along a
pipeline is charged to where it arose. Source: the delay costs of Scalasca, for which computing is
compared by call path.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from mpipar.comm.record import PASSES, Families
from mpipar.run.trace.trace_file import Trace
from mpipar.study.trace.segments import Segment
from mpipar.study.trace.waits import Call, Event, Waits

WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "opt": "optimizer",
    "data": "data loading",
    "eval": "evaluation",
    "save": "checkpoint save",
    "gc": "garbage collection",
    "other": "between spans (Python, posting, logging)",
}


class Cause(NamedTuple):
    """What made others wait: ranks (one, or the ends of a link), what they did, and details.

    kind: compute, opt, data, eval, save, gc, other, transfer or outside.
    """

    kind: str
    ranks: tuple[int, ...]
    what: str

    def text(self) -> str:
        """Return the cause in words, as in `rank 1: forward of stage 1`."""
        if self.kind == "transfer":
            return f"{self.what} between ranks {'-'.join(map(str, self.ranks))}"
        return f"rank {self.ranks[0]}: {self.what}"


@dataclass
class Cost:
    """How long others waited for a cause: in total, by waiting rank, and by barrier."""

    wait_ns: float = 0
    by_rank: Counter = field(default_factory=Counter)
    by_barrier: Counter = field(default_factory=Counter)


class Work:
    """What a rank did in a stretch of time.

    parts: {kind: {detail: {cause: nanoseconds}}}; those with the same kind and detail are
    comparable between ranks. totals: the nanoseconds by kind.
    """

    def __init__(self):
        self.parts: dict[str, dict] = defaultdict(lambda: defaultdict(dict))
        self.totals: Counter = Counter()

    def add(self, kind: str, detail: str, cause: Cause, length: float) -> None:
        """Add nanoseconds that the rank spent for a cause."""
        part = self.parts[kind][detail]
        part[cause] = part.get(cause, 0) + length
        self.totals[kind] += length

    def more_than(self, other: Work, length: float) -> dict[Cause, float]:
        """Return {cause: nanoseconds} of what exceeds `other`, scaled to `length` in total."""
        extra = self.totals - other.totals  # of kinds of which there is more
        scale = length / max(sum(extra.values()), 1e-9)
        found: dict[Cause, float] = defaultdict(float)
        for kind, time in extra.items():
            parts = self._differences(other, kind)
            share = time * scale / sum(parts.values())
            for cause, part in parts.items():
                found[cause] += share * part
        return found

    def _differences(self, other: Work, kind: str) -> dict[Cause, float]:
        """Return {cause: nanoseconds by which the same or similar work is exceeded}.

        If there are more parts, though none is longer than its counterpart, all of them.
        """
        found, whole = {}, {}
        for detail, causes in self.parts[kind].items():
            same = _by_words(other.parts[kind][detail])
            like = sum(same.values()) / max(len(same), 1)  # such as another stage's layer
            here = _by_words(causes)  # causes that do the same, such as both directions of a link
            for cause, time in causes.items():
                usual = same.get(cause.what, like) * time / max(here[cause.what], 1)
                whole[cause] = whole.get(cause, 0) + time
                if time > usual:
                    found[cause] = time - usual
        return found or whole


def _by_words(causes: dict[Cause, float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for cause, time in causes.items():
        sums[cause.what] = sums.get(cause.what, 0) + time
    return sums


class Meetings:
    """When two ranks last met: the moment from which their work can be compared.

    Ranks meet in a collective in which all of its members are blocked at the same time. Two ranks
    also meet where one has waited for the other, as for a message or for the root of a broadcast. A
    message that had arrived before any rank asked for it is no meeting.
    """

    def __init__(self, waits: Waits):
        self.instants: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for event in waits.events:
            for ranks, instant in _meetings_of(event):
                self.instants[ranks].append(instant)
        self.groups: dict[int, set] = defaultdict(set)
        for ranks, instants in self.instants.items():
            instants.sort()
            for rank in ranks:
                self.groups[rank].add(ranks)

    def last(self, one: int, other: int, before: int, otherwise: int) -> int:
        """Return when both ranks last met before a moment, or `otherwise`."""
        found = otherwise
        for ranks in self.groups[one] & self.groups[other]:
            instants = self.instants[ranks]
            place = bisect_left(instants, before)
            if place:
                found = max(found, instants[place - 1])
        return found


def _meetings_of(event: Event) -> list[tuple[tuple[int, ...], int]]:
    """Return [(ranks that met, when)] of one event."""
    if any(len(call.needs) < len(event.calls) for call in event.calls):  # not all wait for all
        return [
            (tuple(sorted((call.rank, call.late))), call.record.waited_ns + call.wait_ns)
            for call in event.calls
            if call.wait_ns
        ]
    instant = max(call.record.waited_ns for call in event.calls)
    blocked = instant <= min(call.record.done_ns for call in event.calls)
    return [(tuple(sorted(event.ranks)), instant)] if blocked else []


class Causes:
    """The causes of all waits of a trace."""

    def __init__(self, trace: Trace, waits: Waits, segments: list[list[Segment]]):
        self.ranks, self.waits, self.segments = trace.ranks, waits, segments
        self.starts = [[segment.start for segment in own] for own in segments]
        self.operations = [[one.start_ns for one in rank.operations] for rank in trace.ranks]
        self.meetings, self.families = Meetings(waits), Families()
        self.parts: dict[int, dict[Cause, float]] = {}  # by the id of a call
        self.computing: dict[tuple, tuple] = {}
        self.latest: tuple = (), Work()
        waiting = [call for own in waits.calls for call in own if call.wait_ns]
        # A wait is explained by waits that ended before it.
        for call in sorted(waiting, key=lambda call: call.record.waited_ns + call.wait_ns):
            self._explain(call)

    def costs(self) -> dict[Cause, Cost]:
        """Return every cause with its cost, the largest first."""
        found: dict[Cause, Cost] = defaultdict(Cost)
        for call in itertools.chain.from_iterable(self.waits.calls):
            barrier = call.record.axis, self.families[call.record.name]
            for cause, length in self.parts.get(id(call), {}).items():
                cost = found[cause]
                cost.wait_ns += length
                cost.by_rank[call.rank] += length
                cost.by_barrier[barrier] += length
        order = sorted(found, key=lambda cause: -found[cause].wait_ns)
        return {cause: found[cause] for cause in order}

    def reason(self, call: Call) -> str:
        """Return in words what most of a call's wait is charged to."""
        parts = self.parts[id(call)]
        return max(parts, key=parts.__getitem__).text()

    def _explain(self, call: Call) -> None:
        """Fill `parts` of a call that waits."""
        late, start = call.late, call.record.waited_ns
        end = start + call.wait_ns
        begin = min(
            start,
            self.meetings.last(
                call.rank, late, end, max(self.ranks[call.rank].start, self.ranks[late].start)
            ),
        )
        if self.latest[0] != (late, begin, end):  # the same for all that wait in one collective
            self.latest = (late, begin, end), self.work(late, begin, end)
        theirs, own = self.latest[1], self.work(call.rank, begin, start)
        self.parts[id(call)] = theirs.more_than(own, call.wait_ns)

    def _within(self, rank: int, start: int, end: int) -> list[Segment]:
        """Return the rank's segments between two moments, cut there."""
        own, first = self.segments[rank], bisect_right(self.starts[rank], start) - 1
        found = []
        for place in range(max(0, first), len(own)):
            segment = own[place]
            if segment.start >= end:
                break
            if segment.start < start or segment.end > end:
                low, high = max(start, segment.start), min(end, segment.end)
                segment = segment._replace(start=low, end=high)
            if segment.end > segment.start:
                found.append(segment)
        return found

    def work(self, rank: int, start: int, end: int) -> Work:
        """Return what a rank did between two moments."""
        work, left = Work(), end - start
        passes: dict[tuple, dict] = defaultdict(lambda: defaultdict(int))
        for segment in self._within(rank, start, end):
            left -= segment.length
            kind, call, span = segment.kind, segment.call, segment.span
            if kind == "wait":
                for cause, length in self.parts.get(id(call), {}).items():
                    share = segment.length / call.wait_ns
                    work.add("waiting", (cause.kind, cause.what), cause, length * share)
            elif kind == "transfer" and (span is None or span.kind != "save"):
                ranks = call.event.ranks if call.event else (rank,)
                what = f"transfer of {self.families[call.record.name]} ({call.record.axis})"
                work.add(kind, what, Cause(kind, ranks, what), segment.length)
            elif kind in PASSES:
                self._passing(rank, segment, passes[kind, span.stage])
            else:
                kind = "save" if kind == "transfer" else kind
                work.add(kind, "", Cause(kind, (rank,), WORDS[kind]), segment.length)
        for (kind, stage), layers in passes.items():
            for layer, length in layers.items():
                work.add("compute", *self._computing(rank, kind, stage, layer), length)
        if left > 0:  # before its first or after its last traced step
            work.add("outside", "", Cause("outside", (rank,), "outside the traced steps"), left)
        return work

    def _passing(self, rank: int, segment: Segment, layers: dict[str, int]) -> None:
        """Add a piece of a pass to {layer: nanoseconds}, if the trace timed operations of layers.

        Time between two operations belongs to the layer of the second.
        """
        starts, operations = self.operations[rank], self.ranks[rank].operations
        now, last = segment.start, segment.end
        first = max(0, bisect_right(starts, now) - 1)
        for place in range(first, bisect_left(starts, segment.span.end_ns)):
            layer, _, _, end, *_ = operations[place]
            until = min(end, last)
            if until > now:
                layers[layer] += until - now
                now = until
            if now == last:
                return
        layers[""] += last - now

    def _computing(self, rank: int, kind: str, stage: int, layer: str) -> tuple:
        """Return by what a layer's part of a pass is comparable, and its cause."""
        key = rank, kind, stage, layer
        if key not in self.computing:
            what = f"{WORDS[kind]} of stage {stage}" + (f", {layer}" if layer else "")
            detail = kind, self.families[layer]
            self.computing[key] = detail, Cause("compute", (rank,), what)
        return self.computing[key]
