"""Compares predicted with measured times, and judges the errors."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from mpipar.console.tables import table

OPERATION_TOLERANCE, STEP_TOLERANCE = 0.10, 0.15


class Subject(NamedTuple):
    """The thing compared: an operation, a chain, a formula or a step, on a number of ranks."""

    what: str
    ranks: int
    link: str


def line(subject: Subject, detail: str, predicted_us: float, measured_us: float,
         extrapolated: bool = False) -> dict:
    """One comparison as a row."""
    return {**subject._asdict(), "detail": detail, "predicted_us": predicted_us,
            "measured_us": measured_us, "error": predicted_us / measured_us - 1,
            "extrapolated": extrapolated}


def judge(lines, step_tolerance: float = STEP_TOLERANCE) -> list[dict]:
    """For each subject: median and largest error, tolerance, and whether it is kept."""
    found: dict = {}
    for one in lines:
        subject = Subject(one["what"], one["ranks"], one["link"])
        found.setdefault(subject, []).append(abs(one["error"]))
    return [{**subject._asdict(), "cases": len(errors), "median_error": statistics.median(errors),
             "largest_error": max(errors),
             "tolerance": (tolerance := tolerance_of(subject.what, step_tolerance)) or "-",
             "verdict": verdict(statistics.median(errors), tolerance)}
            for subject, errors in found.items()]


def verdict(error: float, tolerance: float | None) -> str:
    """"kept" or "NOT KEPT"; "information" where there is no tolerance."""
    if tolerance is None:
        return "information"
    return "kept" if error <= tolerance else "NOT KEPT"


def tolerance_of(what: str, step_tolerance: float) -> float | None:
    """The tolerated error; None for mere information: a chain, algorithms' formulas, products."""
    if what.startswith("step"):
        return step_tolerance
    information = what.startswith(("stage-chain", "all-reduce as", "product"))
    return None if information else OPERATION_TOLERANCE


def shown(lines, verdicts) -> str:
    """A table of the comparisons, and below it one of the verdicts."""
    rows = [("what", "link", "ranks", "size", "predicted_us", "measured_us", "error", "")]
    rows += [(one["what"], one["link"], one["ranks"], one["detail"], f"{one['predicted_us']:.2f}",
              f"{one['measured_us']:.2f}", f"{one['error']:+.1%}",
              "extrapolated" if one["extrapolated"] else "") for one in lines]
    ends = [("what", "link", "ranks", "cases", "median error", "largest", "tolerance", "")]
    ends += [(one["what"], one["link"], one["ranks"], one["cases"], f"{one['median_error']:.1%}",
              f"{one['largest_error']:.1%}",
              "-" if one["tolerance"] == "-" else f"{one['tolerance']:.0%}", one["verdict"])
             for one in verdicts]
    return f"{table(rows, left=2)}\n\n{table(ends, left=2)}"
