"""A rank's time without gaps: what it did at every moment of the traced steps.

Kinds are those of the spans that keep a rank busy, and wait and transfer of every blocking call.
Time outside all of them is "other": Python, posting messages, logging between steps. Blocked time
inside a span counts as wait and transfer, so the rest of a span is computing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from mpipar.comm.record import BUSY, Span
from mpipar.run.trace.trace_file import RankTrace, Trace
from mpipar.study.trace.waits import Call, Waits

IDLE = ("wait", "transfer")


class Segment(NamedTuple):
    """[start, end) of one rank. span: the compute span around it. call: of a wait or transfer."""

    start: int
    end: int
    kind: str
    span: Span | None = None
    call: Call | None = None

    @property
    def length(self) -> int:
        return self.end - self.start


def of_rank(rank: RankTrace, calls: list[Call]) -> list[Segment]:
    """Return the rank's segments from its first step's start to its last step's end, gapless."""
    pieces = [
        (span.start_ns, -span.end_ns, span.kind, span, None)
        for span in rank.spans
        if span.kind in BUSY
    ]
    for call in calls:
        start, end = call.record.waited_ns, call.record.done_ns
        split = start + call.wait_ns
        if split > start:
            pieces.append((start, -split, "wait", None, call))
        if end > split:
            pieces.append((split, -end, "transfer", None, call))
    # A rank has one thread, so pieces nest or follow each other. The innermost one counts.
    pieces.sort(key=lambda piece: piece[:2])
    found: list[Segment] = []
    stack = [(rank.end, "other", None, None)]
    now = rank.start

    def advance(until):
        nonlocal now
        if until > now:
            _, kind, span, call = stack[-1]
            found.append(Segment(now, until, kind, span, call))
            now = until

    for start, minus_end, kind, span, call in pieces:
        while stack[-1][0] <= start and len(stack) > 1:
            advance(stack[-1][0])
            stack.pop()
        advance(start)
        stack.append((min(-minus_end, stack[-1][0]), kind, span or stack[-1][2], call))
    while stack:
        advance(stack[-1][0])
        stack.pop()
    return found


def of_trace(trace: Trace, waits: Waits) -> list[list[Segment]]:
    """Return segments by rank."""
    return [of_rank(rank, calls) for rank, calls in zip(trace.ranks, waits.calls, strict=True)]


def by_kind(segments: Iterable[Segment], kind: Callable = attrgetter("kind")) -> Counter:
    """Return the nanoseconds of each kind."""
    return by_step(segments, [(0, -math.inf, math.inf)], kind)[0]


def by_step(
    segments: Iterable[Segment],
    steps: Sequence[tuple[int, float, float]],
    kind: Callable = attrgetter("kind"),
) -> list[Counter]:
    """Return the nanoseconds of each kind in each (step, start, end), in one walk over both."""
    sums: list[Counter] = [Counter() for _ in steps]
    first = 0
    for segment in segments:
        while first < len(steps) and steps[first][2] <= segment.start:
            first += 1
        for place in range(first, len(steps)):
            _, start, end = steps[place]
            if start >= segment.end:
                break
            sums[place][kind(segment)] += min(segment.end, end) - max(segment.start, start)
    return sums
