"""Whether B is faster or slower than A, as far as the launches of both support it.

    python -m bench.compare A.jsonl B.jsonl

Launches of the same job differ more than the iterations inside one. So each launch counts as one
value: a rank-sum test compares the medians of A's launches with those of B's. Of all rows that are
called faster or slower, at most 5 % are expected to be so by chance.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import numpy as np

from bench.interconnect import records
from bench.interconnect.statistics import discoveries, rank_sum
from mpipar.config import flags
from mpipar.console.tables import table
from mpipar.errors import EXIT_OK, DataError
from mpipar.job.session import guard

FALSE_RATE = 0.05
KEY = ("case", "via", "transport", "dtype", "buffers", "axis", "mode", "ranks", "window",
       "size_bytes", "sync")
VERDICTS = "faster", "slower", "not shown"


class Comparison(NamedTuple):
    """One operation in both files: medians over launches, and the p-value of their difference."""

    key: tuple
    launches: tuple[int, int]
    a_us: float
    b_us: float
    p_value: float
    verdict: str


def by_operation(rows) -> dict[tuple, list[float]]:
    """The median of each launch, for each operation; the rounds of a launch make one value."""
    found: dict = {}
    for row in rows:
        key = tuple(tuple(row[name]) if name == "ranks" else row[name] for name in KEY)
        found.setdefault(key, {}).setdefault(row["launch"], []).append(row["median_us"])
    return {key: [float(np.median(one)) for one in launches.values()]
            for key, launches in found.items()}


def compare_rows(a_rows, b_rows) -> list[Comparison]:
    """Every operation that both have, in A's order."""
    a, b = by_operation(a_rows), by_operation(b_rows)
    keys = [key for key in a if key in b]
    p_values = [rank_sum(a[key], b[key]) for key in keys]
    sure = discoveries(p_values, FALSE_RATE)
    found = []
    for key, p_value, stands in zip(keys, p_values, sure, strict=True):
        a_us, b_us = float(np.median(a[key])), float(np.median(b[key]))
        verdict = VERDICTS[2]
        if stands and a_us != b_us:
            verdict = VERDICTS[0 if b_us < a_us else 1]
        found.append(Comparison(key, (len(a[key]), len(b[key])), a_us, b_us, p_value, verdict))
    return found


def lines(found) -> str:
    """The comparisons as a table; ratio: B's time over A's."""
    rows = [("case", "via", "ranks", "mode", "size_B", "launches", "A_us", "B_us", "ratio", "p",
             "B is")]
    for one in found:
        key = dict(zip(KEY, one.key, strict=True))
        ranks = ",".join(map(str, key["ranks"]))
        rows.append((key["case"], key["via"], ranks, key["mode"] or "-", key["size_bytes"],
                     "+".join(map(str, one.launches)), f"{one.a_us:.2f}", f"{one.b_us:.2f}",
                     f"{one.b_us / one.a_us:.3f}", f"{one.p_value:.4f}", one.verdict))
    return table(rows, left=4)


def too_few(found) -> str:
    """A remark if so few launches could not show any difference, however large; else ""."""
    if not found:
        return ""
    a, b = min(one.launches for one in found)
    least = 2 / math.comb(a + b, a)
    if least <= FALSE_RATE:
        return ""
    return (f"{a} and {b} launches can show nothing (p is {min(1.0, least):.2g} at least): measure "
            "both with --launches 5 or more")


def main(argv, session) -> int:
    """Print one line for each operation in both files."""
    parser = flags.Parser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("a", metavar="A", help="file of bench.interconnect --launches K --json")
    parser.add_argument("b", metavar="B", help="the same operations, measured otherwise")
    args = parser.parse_args(argv)
    found = compare_rows(*(records.rows_of([one], tell=True) for one in (args.a, args.b)))
    if not found:
        raise DataError(f"{args.a} and {args.b} have no operation in common: run the same cases, "
                        "sizes and ranks with the same --buffers and --sync for both")
    print(lines(found))
    if warning := too_few(found):
        print(warning, file=sys.stderr)
    return EXIT_OK


if __name__ == "__main__":
    guard(main)
