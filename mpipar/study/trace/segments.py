"""A rank's time without gaps: what it did at every moment of the traced steps, also as text.

Kinds are those of the spans that keep a rank busy, and wait and transfer of every blocking call.
Time outside all of them is "other": Python, posting messages, logging between steps. Blocked time
inside a span counts as wait and transfer, so the rest of a span is computing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from mpipar.comm.record import BUSY, Span
from mpipar.run.trace.trace_file import RankTrace, Trace
from mpipar.study.trace.waits import Call, Waits

IDLE = ("wait", "transfer")
LETTERS = {
    "F": "F",
    "B": "B",
    "I": "I",
    "W": "W",
    "opt": "o",
    "data": "d",
    "eval": "e",
    "save": "s",
    "gc": "g",
    "wait": ".",
    "transfer": "-",
    "other": " ",
}
LEGEND = (
    "F B I W passes, o optimizer, d data, e evaluates, s saves, g collects garbage, . waits,"
    " - transfer"
)


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
    sums: Counter = Counter()
    for segment in segments:
        sums[kind(segment)] += segment.end - segment.start
    return sums


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


def timeline(
    trace: Trace,
    segments: list[list[Segment]],
    width: int = 100,
    window: tuple[int, int] | None = None,
) -> str:
    """Return a row of letters per rank; each slice shows what the rank did for most of it.

    width: the most characters of a line. window: start and end in ns, by default the whole trace.
    """
    start, end = window or (trace.start, trace.end)
    heads = [f"rank {rank.world_rank} " for rank in trace.ranks]
    margin = max(map(len, heads))
    columns = width - margin
    length = (end - start) / columns
    first_ms, last_ms = f"{start * 1e-6:.1f}", f"{end * 1e-6:.1f}"
    lines = [f"{'ms':<{margin}}{first_ms}{last_ms:>{columns - len(first_ms)}}"]
    slices = [(at, start + at * length, start + (at + 1) * length) for at in range(columns)]
    for head, own in zip(heads, segments, strict=True):
        row = (LETTERS[max(sums, key=sums.get)] if sums else " " for sums in by_step(own, slices))
        lines.append((head.ljust(margin) + "".join(row)).rstrip())
    return "\n".join([*lines, LEGEND])


def median_step(trace: Trace) -> tuple[int, tuple[int, int]]:
    """Return (step, (start, end) over all ranks) of the step of median length."""
    windows = trace.windows()
    order = sorted(range(trace.num_steps), key=lambda i: windows[i][1] - windows[i][0])
    chosen = order[len(order) // 2]
    return trace.ranks[0].steps[chosen][0], windows[chosen]
