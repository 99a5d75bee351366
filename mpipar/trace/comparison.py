"""Two traced runs side by side: what got slower, by cause, and whether that is more than noise.

A difference counts only when it exceeds the spread. B is slower when its lower quartile over steps
lies above A's upper quartile, and faster in the opposite case. With fewer than three steps on a
side there is no verdict.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from mpipar.errors import DataError
from mpipar.files.bounded import read_toml
from mpipar.trace.analysis import Analysis, category
from mpipar.trace.causes import WORDS
from mpipar.trace.segments import Segment
from mpipar.trace.trace_file import Trace

LEAST_STEPS = 3
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
    """`slower`, `faster`, or "" where the quartiles overlap or there are too few values."""
    if min(len(before), len(after)) < LEAST_STEPS:
        return ""
    low_before, _, high_before = quantiles(before, n=4, method="inclusive")
    low_after, _, high_after = quantiles(after, n=4, method="inclusive")
    if low_after > high_before:
        return "slower"
    return "faster" if high_after < low_before else ""


def change(what: str, before: list[float], after: list[float]) -> Change:
    """The medians of two lists of milliseconds, and their verdict."""
    return Change(what, median(before), median(after), verdict(before, after))


def untraced_ms(trace: Trace) -> list[float]:
    """Milliseconds of each step that was not traced, except the first."""
    traced = {step for step, *_ in trace.ranks[0].steps}
    return [line["step_seconds"] * 1e3 for line in trace.metrics[1:] if line["step"] not in traced]


def step_time(before: Analysis, after: Analysis) -> tuple[Change, str, bool]:
    """How long a step takes, which steps say so, and whether they show a spread.

    Where both runs have enough steps that were not traced, these count, except the first.
    --trace-ops slows the traced steps down. Otherwise the traced steps count.
    """
    whole = [untraced_ms(side.trace) for side in (before, after)]
    if min(map(len, whole)) >= LEAST_STEPS:
        return change("step", *whole), f"{len(whole[0])} and {len(whole[1])} steps", True
    traced = [[max(rank.steps[i][2] - rank.steps[i][1] for rank in side.trace.ranks) * 1e-6
               for i in range(side.trace.num_steps)] for side in (before, after)]
    return (change("step", *traced), f"{len(traced[0])} and {len(traced[1])} traced steps",
            min(map(len, traced)) >= LEAST_STEPS)


def item(segment: Segment, by_stage: bool) -> str:
    """The name under which a piece of time is compared. by_stage: whether it names the stage."""
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
    """{item: ms in each step}, means over the ranks; all items of a step make up the step."""
    trace = analysis.trace
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * trace.num_steps)
    for rank, own in zip(trace.ranks, analysis.segments, strict=True):
        step = 0
        for segment in own:
            while step + 1 < trace.num_steps and segment.start >= rank.steps[step][2]:
                step += 1
            _, start, end = rank.steps[step]
            length = min(end, segment.end) - max(start, segment.start)
            if length > 0:
                found[item(segment, by_stage)][step] += length * 1e-6 / len(trace.ranks)
    return found


def same_stages(before: Analysis, after: Analysis) -> bool:
    """Whether each stage does the same work in both runs."""
    return before.trace.meta["stages"] == after.trace.meta["stages"]


def items(before: Analysis, after: Analysis) -> list[Change]:
    """Changes of all items, the largest loss first."""
    by_stage = same_stages(before, after)
    sides = by_item(before, by_stage), by_item(after, by_stage)
    names = {name: None for side in sides for name in side}
    changes = [change(name, sides[0].get(name, [0.0] * before.trace.num_steps),
                      sides[1].get(name, [0.0] * after.trace.num_steps)) for name in names]
    return sorted(changes, key=lambda one: -one.change_ms)


def waited_for(before: Analysis, after: Analysis) -> list[Change]:
    """What others waited for, in ms per step summed over ranks, the largest loss first."""
    sides = [{cause.text(): cost.wait_ns * 1e-6 / side.trace.num_steps
              for cause, cost in side.costs.items()} for side in (before, after)]
    changes = [Change(text, sides[0].get(text, 0.0), sides[1].get(text, 0.0))
               for text in {text: None for side in sides for text in side}]
    return sorted(changes, key=lambda one: -one.change_ms)


def settings_that_differ(before: Path, after: Path) -> list[tuple[str, object, object]]:
    """(key, value before, value after) where the two config.toml differ, if they can be read."""
    values = []
    for folder in (before, after):
        try:
            values.append(read_toml(folder / "config.toml", DataError))
        except DataError:
            return []
    names = [name for name in {**values[0], **values[1]} if name not in PLACES]
    return [(name, values[0].get(name), values[1].get(name)) for name in names
            if values[0].get(name) != values[1].get(name)]
