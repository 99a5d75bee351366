"""Compares two results by case and size: what became slower, as far as the launches can tell.

With three launches or more on both sides, an operation is slower if every launch of AFTER is slower
than every launch of BEFORE, and the medians differ by a factor of 1.1. With fewer, the spread
between launches is unknown: then the factor must be 1.5, and the intervals must not overlap.
"""

from typing import Any

import numpy as np

from mpipar.interconnect.files import Row
from mpipar.interconnect.screen import digits, short
from mpipar.interconnect.statistics import KEY, by_operation, median_interval, next_launch
from mpipar.run.console.tables import table

ENOUGH, FACTOR, FACTOR_OF_FEW = 3, 1.1, 1.5
SLOWER, FASTER = "slower", "faster"


class Side:
    """One operation in one result: its launches' medians, and their interval."""

    def __init__(self, rows: list[Row]):
        self.medians = [row["median_us"] for row in rows]
        self.us = float(np.median(self.medians))
        if len(rows) > 1:
            self.low, self.high = next_launch(self.medians)
        else:
            self.low, self.high = median_interval(rows[0]["times_us"])


def verdict(a: Side, b: Side) -> str:
    """Return whether b is slower or faster than a, or ""."""
    few = min(len(a.medians), len(b.medians)) < ENOUGH
    for name, fast, slow in ((SLOWER, a, b), (FASTER, b, a)):
        apart = fast.high < slow.low if few else max(fast.medians) < min(slow.medians)
        if apart and slow.us > (FACTOR_OF_FEW if few else FACTOR) * fast.us:
            return name
    return ""


def compared(before: list[Row], after: list[Row]) -> tuple[list[Row], list[str]]:
    """Return (a line for each operation of both, names of those that are missing in `after`)."""
    others, lines, missing = by_operation(after), [], []
    for key, rows in by_operation(before).items():
        own = dict(zip(KEY, key, strict=True))
        name = f"{own['case']}, {own['size_bytes']} bytes, {short(own['via'])}"
        if key not in others:
            missing.append(name)
            continue
        a, b = Side(rows), Side(others[key])
        lines.append(own | {"a": a, "b": b, "verdict": verdict(a, b)})
    return lines, missing


def text(lines: list[Row]) -> str:
    """Return the comparison as a table of at most 100 columns."""
    rows: list[tuple[Any, ...]] = [
        ("case", "size", "via", "runs", "before", "interval", "after", "ratio", "is")
    ]
    for line in lines:
        a, b = line["a"], line["b"]
        runs, interval = f"{len(a.medians)}+{len(b.medians)}", f"{digits(a.low)}..{digits(a.high)}"
        times = digits(a.us), interval, digits(b.us), f"{b.us / a.us:.3f}" if a.us else "-"
        what = line["case"], line["size_bytes"], short(line["via"])
        rows.append((*what, runs, *times, line["verdict"] or "-"))
    return table(rows)
