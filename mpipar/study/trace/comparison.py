"""Compares two traced runs: what got slower, by cause, and whether that is more than noise.

Every value is a median over steps with its quartiles. A difference counts only when it exceeds the
spread: B is slower when its lower quartile is above A's upper quartile, and faster in the opposite
case. With fewer than three steps on a side there is no verdict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpipar.errors import DataError
from mpipar.run.files.bounded import read_toml
from mpipar.study.trace.analysis import Analysis, category
from mpipar.study.trace.causes import WORDS
from mpipar.study.trace.segments import Segment, by_step

LEAST_STEPS = 3
PLACES = {"out", "trace"}  # settings that do not change what is run


@dataclass(frozen=True)
class Change:
    """One cause in both runs: (lower quartile, median, upper quartile) of ms per step.

    verdict: slower, faster or "" (within the spread, or unknown).
    """

    what: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    verdict: str = ""

    @property
    def ms(self) -> float:
        """How much longer it takes in B, by the medians."""
        return self.after[1] - self.before[1]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the three quartiles of at least one value."""
    return tuple(np.percentile(values, (25, 50, 75)).tolist())


def change(what: str, before: Sequence[float], after: Sequence[float]) -> Change:
    """Return how the milliseconds of each step changed, and whether beyond their spread."""
    old, new = quartiles(before), quartiles(after)
    known = min(len(before), len(after)) >= LEAST_STEPS
    verdict = "slower" if new[0] > old[2] else "faster" if new[2] < old[0] else ""
    return Change(what, old, new, verdict if known else "")


def step_time(before: Analysis, after: Analysis) -> tuple[Change, list[int]]:
    """Return the change of a step's time, and how many steps of each run it is from.

    Those are all of its steps but the first; the traced ones, where no others are known.
    """
    times = [
        [line["step_seconds"] * 1e3 for line in one.trace.metrics[1:]]
        or [(end - start) * 1e-6 for start, end in one.trace.windows()]
        for one in (before, after)
    ]
    return change("step", *times), [len(own) for own in times]


def item(segment: Segment, by_stage: bool) -> str:
    """Return the name under which a piece of time is compared. by_stage: if it names stages."""
    kind = category(segment)
    if kind in ("forward", "backward"):
        return "compute: " + (
            f"{WORDS[segment.kind]} of stage {segment.span.stage}" if by_stage else kind
        )
    if segment.call is None:
        return WORDS[segment.kind]
    return {
        "bubble": "bubble: waiting for a message of the pipeline",
        "waiting": f"waiting for rank {segment.call.late}",
        "transfer": f"transfer over {segment.call.record.axis}",
    }[kind]


def by_item(analysis: Analysis, by_stage: bool = True) -> dict[str, list[float]]:
    """Return {item: ms in each step}, means over the ranks; a step's items add up to the step."""
    trace = analysis.trace
    found: dict[str, list[float]] = {}
    for rank, own in zip(trace.ranks, analysis.segments, strict=True):
        for at, step in enumerate(by_step(own, rank.steps, lambda one: item(one, by_stage))):
            for name, length in step.items():
                times = found.setdefault(name, [0.0] * trace.num_steps)
                times[at] += length * 1e-6 / len(trace.ranks)
    return found


def items(before: Analysis, after: Analysis) -> list[Change]:
    """Return changes of all items, largest loss first. A stage is named if both have the same."""
    by_stage = before.trace.meta["stages"] == after.trace.meta["stages"]
    sides = [(by_item(one, by_stage), [0.0] * one.trace.num_steps) for one in (before, after)]
    names = dict.fromkeys(name for times, _ in sides for name in times)
    found = [change(name, *(times.get(name, none) for times, none in sides)) for name in names]
    return sorted(found, key=lambda one: -one.ms)


def settings_that_differ(before: Path, after: Path) -> list[tuple[str, object, object]]:
    """Return (key, value before, value after) where two config.toml differ, if they can be read."""
    try:
        old, new = (read_toml(folder / "config.toml", DataError) for folder in (before, after))
    except DataError:
        return []
    return [
        (name, old.get(name), new.get(name))
        for name in {**old, **new}
        if name not in PLACES and old.get(name) != new.get(name)
    ]
