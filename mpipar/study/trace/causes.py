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

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from mpipar.comm.record import PASSES, Families
from mpipar.run.trace.trace_file import RankTrace, Trace
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
    "outside": "outside the traced steps",
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


WAITING = Cause("waiting", (), "")  # of time that is charged to the causes of the waits in it
FAR = 2**62  # ns; nothing is traced before its negative or after it


class Cost(NamedTuple):
    """How long others waited for a cause. rank, barrier: where they waited longest."""

    wait_ns: float
    rank: int
    barrier: tuple[str, str]


class Comparison:
    """What more one rank did than another, if their work is written in nanoseconds by cause.

    An array of work has two entries for each cause: what the rank did itself, and what it waited
    for. Causes of the same kind and words are the same work, as both directions of a link; similar
    work differs in numbers, as another stage's layer. kinds, words, families: arrays of the number
    of each entry's kind, of its words, and of the family of each of these words.
    """

    def __init__(self, causes: list[Cause]):
        known = Families()
        doing = [(one.kind, one.what, known[one.what]) for one in causes]
        waiting = [("waiting", (one.kind, one.what), (one.kind, one.what)) for one in causes]
        entries = doing + waiting
        self.kinds, _ = _numbered(kind for kind, *_ in entries)
        self.words, different = _numbered(entries)
        self.families, _ = _numbered((kind, family) for kind, _, family in different)

    def more(self, theirs: np.ndarray, own: np.ndarray, length: float) -> np.ndarray:
        """Return what exceeds `own` by entry, scaled to `length` in total.

        Only the kinds of which there is more. If there are more parts, though none is longer than
        its counterpart, all of them count.
        """
        here, same = (np.bincount(self.words, work) for work in (theirs, own))
        like = np.bincount(self.families, same) / np.maximum(
            np.bincount(self.families, same > 0), 1
        )
        usual = np.where(same > 0, same, like[self.families])
        longer = theirs - usual[self.words] * theirs / np.maximum(here, 1)[self.words]
        longer = np.maximum(longer, 0)
        longer = np.where(np.bincount(self.kinds, longer)[self.kinds] > 0, longer, theirs)
        extra = np.maximum(np.bincount(self.kinds, theirs - own), 0)
        share = extra * (length / max(extra.sum(), 1e-9))
        share /= np.maximum(np.bincount(self.kinds, longer), 1e-9)
        return share[self.kinds] * longer


def _numbered(values: Iterable) -> tuple[np.ndarray, list]:
    """Return the number of each of some values, and the different ones in the order of numbers."""
    numbers: dict = {}
    return np.array([numbers.setdefault(one, len(numbers)) for one in values]), list(numbers)


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
    """The causes of all waits of a trace.

    parts: by the id of a call that waits, the numbers of the causes of its wait, and nanoseconds.
    pieces: by rank, the moments at which it began to do something else, and the causes' numbers.
    waiting: by rank, the moments at which its waits begin, and the segments.
    """

    def __init__(self, trace: Trace, waits: Waits, segments: list[list[Segment]]):
        self.ranks, self.waits = trace.ranks, waits
        self.meetings, self.families = Meetings(waits), Families()
        self.parts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.numbers: dict[Cause, int] = {WAITING: 0}
        self.pieces = [self._pieces(*both) for both in zip(trace.ranks, segments, strict=True)]
        self.waiting = []
        for own in segments:
            waiting = [segment for segment in own if segment.kind == "wait"]
            self.waiting.append(([segment.start for segment in waiting], waiting))
        self.causes = list(self.numbers)
        self.comparison = Comparison(self.causes)
        self.latest: tuple = (), None
        # A wait is explained by waits that ended before it.
        calls = [call for own in waits.calls for call in own if call.wait_ns]
        for call in sorted(calls, key=lambda call: call.record.waited_ns + call.wait_ns):
            self._explain(call)

    def costs(self) -> dict[Cause, Cost]:
        """Return every cause with its cost, the largest first."""
        calls = [call for own in self.waits.calls for call in own if id(call) in self.parts]
        parts = [self.parts[id(call)] for call in calls]
        if not parts:
            return {}
        sizes = [len(numbers) for numbers, _ in parts]
        numbers, times = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        barriers, names = _numbered(
            (call.record.axis, self.families[call.record.name]) for call in calls
        )

        def sums(places) -> np.ndarray:
            """Return the nanoseconds by cause and place. places: the one of each call."""
            found = np.zeros((len(self.causes), max(places) + 1))
            np.add.at(found, (numbers, np.repeat(places, sizes)), times)
            return found

        by_rank, by_barrier = sums([call.rank for call in calls]), sums(barriers)
        wait_ns, ranks, places = by_rank.sum(1), by_rank.argmax(1), by_barrier.argmax(1)
        return {
            self.causes[one]: Cost(float(wait_ns[one]), int(ranks[one]), names[places[one]])
            for one in np.argsort(-wait_ns, kind="stable")
            if wait_ns[one]
        }

    def reason(self, call: Call) -> str:
        """Return in words what most of a call's wait is charged to."""
        numbers, times = self.parts[id(call)]
        return self.causes[numbers[times.argmax()]].text()

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
        own = self.work(call.rank, begin, start)
        doing, waiting = self.comparison.more(self.latest[1], own, call.wait_ns).reshape(2, -1)
        total = doing + waiting
        self.parts[id(call)] = (found := np.flatnonzero(total)), total[found]

    def work(self, rank: int, start: int, end: int) -> np.ndarray:
        """Return what a rank did between two moments, as an array for `Comparison`."""
        edges, causes = self.pieces[rank]
        first, last = edges.searchsorted((start, end), "right")
        cut = edges[first - 1 : last + 1].copy()
        cut[0], cut[-1] = start, end
        work = np.bincount(causes[first - 1 : last], cut[1:] - cut[:-1], 2 * len(self.causes))
        work[0] = 0
        starts, segments = self.waiting[rank]
        for place in range(max(0, bisect_right(starts, start) - 1), bisect_left(starts, end)):
            segment, call = segments[place], segments[place].call
            length = min(segment.end, end) - max(segment.start, start)
            if length > 0 and id(call) in self.parts:
                numbers, times = self.parts[id(call)]
                work[numbers + len(self.causes)] += times * (length / call.wait_ns)
        return work

    def _pieces(self, rank: RankTrace, segments: list[Segment]) -> tuple[np.ndarray, np.ndarray]:
        """Return when the cause of what a rank does changes, and the causes' numbers.

        In a pass it is the layer if operations were timed. Time between two operations belongs to
        the layer of the second.
        """
        starts = np.array([segment.start for segment in segments])
        until = np.array([seg.span.end_ns if seg.kind in PASSES else -1 for seg in segments])
        doing, known = _numbered(map(_what, segments))
        layers, _, begins, ends, *_ = rank.operations
        layers, begins = np.append(layers, 0), np.append(begins, FAR)
        ends = np.maximum.accumulate(ends)
        edges = np.sort(np.concatenate((starts, ends)), kind="stable")
        edges = edges[(edges >= rank.start) & (edges < rank.end)]
        segment, following = (
            starts.searchsorted(edges, "right") - 1,
            ends.searchsorted(edges, "right"),
        )
        layer = np.where(begins[following] < until[segment], layers[following] + 1, 0)
        texts = "", *rank.texts
        pairs = doing[segment] * len(texts) + layer
        numbers = np.zeros(len(known) * len(texts), int)
        for pair in np.flatnonzero(np.bincount(pairs)):
            what, text = known[pair // len(texts)], texts[pair % len(texts)]
            numbers[pair] = self._number(rank.world_rank, what, text)
        outside = self._number(rank.world_rank, ("outside",), "")
        return (
            np.concatenate(([-FAR], edges, [rank.end, FAR])),
            np.concatenate(([outside], numbers[pairs], [outside])),
        )

    def _number(self, rank: int, doing: tuple, layer: str) -> int:
        """Return the number of the cause of what `_what` says."""
        kind, *more = doing
        if kind in PASSES:
            what = f"{WORDS[kind]} of stage {more[0]}" + (f", {layer}" if layer else "")
            cause = Cause("compute", (rank,), what)
        elif kind == "transfer":
            axis, name, ranks = more
            what = f"transfer of {self.families[name]} ({axis})"
            cause = Cause(kind, ranks or (rank,), what)
        elif kind == "wait":
            cause = WAITING
        else:
            cause = Cause(kind, (rank,), WORDS[kind])
        return self.numbers.setdefault(cause, len(self.numbers))


def _what(segment: Segment) -> tuple:
    """Return what all segments of a rank with the same cause have in common."""
    kind, call, span = segment.kind, segment.call, segment.span
    if kind in PASSES:
        return kind, span.stage
    if kind != "transfer":
        return (kind,)
    if span and span.kind == "save":
        return ("save",)
    return kind, call.record.axis, call.record.name, call.event and call.event.ranks
