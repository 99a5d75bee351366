"""Compares two traced runs: what got slower, by cause, and whether that is more than noise.

A difference counts only when it exceeds the spread: B is slower when its lower quartile is above
A's upper quartile, and faster in the opposite case. With fewer than three values on a side there is
no verdict. A side is one or several launches of a run. With three launches on both sides the values
are the medians of the launches, because launches differ by more than steps do; otherwise they are
the steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles

from mpipar.errors import DataError
from mpipar.files.bounded import read_toml
from mpipar.trace.analysis import Analysis, category
from mpipar.trace.causes import WORDS
from mpipar.trace.segments import Segment, by_kind
from mpipar.trace.trace_file import Trace

LEAST_STEPS = LEAST_LAUNCHES = 3
Side = Sequence[Analysis]  # the launches of one run
PLACES = {"out", "run-name", "trace", "trace-ops"}  # settings that do not change what is run


@dataclass(frozen=True)
class Change:
    """One cause: ms per step, and the verdict: slower, faster or "" (within noise, or unknown)."""

    what: str
    before_ms: float
    after_ms: float
    verdict: str = ""

    @property
    def change_ms(self) -> float:
        return self.after_ms - self.before_ms


def verdict(before: list[float], after: list[float]) -> str:
    """Return `slower`, `faster`, or "" where quartiles overlap or there are too few values."""
    if min(len(before), len(after)) < LEAST_STEPS:
        return ""
    low_before, _, high_before = quantiles(before, n=4, method="inclusive")
    low_after, _, high_after = quantiles(after, n=4, method="inclusive")
    if low_after > high_before:
        return "slower"
    return "faster" if high_after < low_before else ""


def by_launch(before: Side, after: Side) -> bool:
    """Return whether both sides have enough launches to show how much launches differ."""
    return min(len(before), len(after)) >= LEAST_LAUNCHES


def change(what: str, before: list[list[float]], after: list[list[float]]) -> Change:
    """Return the medians of the milliseconds of all launches, and their verdict: see above."""
    launches = by_launch(before, after)
    sides = [
        [median(one) for one in side] if launches else [ms for one in side for ms in one]
        for side in (before, after)
    ]
    return Change(what, *map(median, sides), verdict(*sides))


def untraced_ms(trace: Trace) -> list[float]:
    """Return the milliseconds of each step that was not traced, except the first."""
    traced = {step for step, *_ in trace.ranks[0].steps}
    return [line["step_seconds"] * 1e3 for line in trace.metrics[1:] if line["step"] not in traced]


def traced_ms(trace: Trace) -> list[float]:
    """Return the milliseconds of each traced step."""
    return [
        max(rank.steps[i][2] - rank.steps[i][1] for rank in trace.ranks) * 1e-6
        for i in range(trace.num_steps)
    ]


def step_time(before: Side, after: Side) -> tuple[Change, str, bool]:
    """Return the step times, which steps or launches they are from, and if these show a spread.

    If both runs have enough steps that were not traced, these are taken, except the first, because
    --trace-ops slows the traced steps down. Otherwise the traced steps are taken.
    """
    kind, times = "steps", [[untraced_ms(one.trace) for one in side] for side in (before, after)]
    if min(len(one) for side in times for one in side) < LEAST_STEPS:
        kind, times = (
            "traced steps",
            [[traced_ms(one.trace) for one in side] for side in (before, after)],
        )
    found = change("step", *times)
    if by_launch(before, after):
        return found, f"{len(before)} and {len(after)} launches", True
    first, second = (sum(map(len, side)) for side in times)
    return found, f"{first} and {second} {kind}", min(first, second) >= LEAST_STEPS


def item(segment: Segment, by_stage: bool) -> str:
    """Return the name under which a piece of time is compared. by_stage: if it names stages."""
    kind = category(segment)
    if kind in ("forward", "backward"):
        if not by_stage:
            return f"compute: {kind}"
        return f"compute: {WORDS[segment.kind]} of stage {segment.span.stage}"
    if kind == "bubble":
        return "bubble: waiting for a message of the pipeline"
    if kind == "waiting":
        return f"waiting for rank {segment.call.late}"
    if kind == "transfer":
        return f"transfer over {segment.call.record.axis}"
    return WORDS[segment.kind]


def by_item(analysis: Analysis, by_stage: bool) -> dict[str, list[float]]:
    """Return {item: ms in each step}, means over the ranks; a step's items add up to the step."""
    trace = analysis.trace
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * trace.num_steps)
    for rank, own in zip(trace.ranks, analysis.segments, strict=True):
        for at, (_, start, end) in enumerate(rank.steps):
            for name, length in by_kind(own, start, end, partial(item, by_stage=by_stage)).items():
                found[name][at] += length * 1e-6 / len(trace.ranks)
    return found


def items(before: Side, after: Side) -> list[Change]:
    """Return changes of all items, largest loss first. A stage is named if both have the same."""
    stages = [one.trace.meta["stages"] for one in (*before, *after)]
    sides = [
        [
            (by_item(one, stages.count(stages[0]) == len(stages)), one.trace.num_steps)
            for one in side
        ]
        for side in (before, after)
    ]
    names = {name: None for side in sides for found, _ in side for name in found}
    changes = [
        change(name, *([found.get(name, [0.0] * steps) for found, steps in side] for side in sides))
        for name in names
    ]
    return sorted(changes, key=lambda one: -one.change_ms)


def waited_for(before: Side, after: Side) -> list[Change]:
    """Return what others waited for, in ms per step summed over ranks, the largest loss first."""
    sides = [
        [
            {
                cause.text(): cost.wait_ns * 1e-6 / one.trace.num_steps
                for cause, cost in one.costs.items()
            }
            for one in side
        ]
        for side in (before, after)
    ]
    names = {text: None for side in sides for found in side for text in found}
    changes = [
        Change(text, *(median(found.get(text, 0.0) for found in side) for side in sides))
        for text in names
    ]
    return sorted(changes, key=lambda one: -one.change_ms)


def settings_that_differ(before: Path, after: Path) -> list[tuple[str, object, object]]:
    """Return (key, value before, value after) where two config.toml differ, if they can be read."""
    values = []
    for folder in (before, after):
        try:
            values.append(read_toml(folder / "config.toml", DataError))
        except DataError:
            return []
    names = [name for name in {**values[0], **values[1]} if name not in PLACES]
    return [
        (name, values[0].get(name), values[1].get(name))
        for name in names
        if values[0].get(name) != values[1].get(name)
    ]
