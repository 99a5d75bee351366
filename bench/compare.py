"""Tests whether B is significantly faster or slower than A, taking each launch as one sample.

    python -m bench.compare A.jsonl B.jsonl            # one line for each operation in both
    python -m bench.compare A.jsonl B.jsonl --check    # exit code 1 if one is slower, or not in B

Launches of the same job differ more than the iterations inside one, so each launch counts as one
value: a rank-sum test compares the medians of A's launches with those of B's. Among all rows that
are called faster or slower, at most 5 % are expected to be so by chance. Among many rows this hides
a single difference, so a row also counts if its factor is above 1.5 and its own p at most 0.05.

With one launch on a side, the spread between launches is unknown. Such a row counts if its factor
is above 1.5 and the 95 % intervals inside the launches do not overlap. It is marked "one launch".
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np

from bench import results
from bench.interconnect import records
from bench.interconnect.between import KEY, by_operation, medians_of
from bench.interconnect.statistics import discoveries, rank_sum
from bench.program import Program
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, DataError, UsageError
from mpipar.files.text import counted

FALSE_RATE = 0.05
LARGE_FACTOR = 1.5
FASTER, SLOWER, NOT_SHOWN = "faster", "slower", "not shown"


class Side(NamedTuple):
    """One operation in one file: its launches' medians, and an interval covering all of theirs."""

    medians: list[float]
    low_us: float
    high_us: float


class Comparison(NamedTuple):
    """One operation in both files: medians over launches, and the p-value of their difference."""

    key: tuple
    launches: tuple[int, int]
    a_us: float
    b_us: float
    p_value: float
    verdict: str


def sides(rows) -> dict[tuple, Side]:
    """Return each operation in a file."""
    return {
        key: Side(
            medians_of(launches),
            min(row["low_us"] for own in launches for row in own),
            max(row["high_us"] for own in launches for row in own),
        )
        for key, launches in by_operation(rows).items()
    }


def compare_rows(a_rows, b_rows) -> list[Comparison]:
    """Return every operation that both have, in A's order."""
    a, b = sides(a_rows), sides(b_rows)
    keys = [key for key in a if key in b]
    p_values = [rank_sum(a[key].medians, b[key].medians) for key in keys]
    sure = discoveries(p_values, FALSE_RATE)
    return [
        compared(key, a[key], b[key], p_value, stands)
        for key, p_value, stands in zip(keys, p_values, sure, strict=True)
    ]


def compared(key: tuple, a: Side, b: Side, p_value: float, stands: bool) -> Comparison:
    """Return one operation; stands: whether its p-value is among the discoveries."""
    launches = len(a.medians), len(b.medians)
    a_us, b_us = (float(np.median(side.medians)) for side in (a, b))
    if min(launches) == 1:
        apart = a.high_us < b.low_us or b.high_us < a.low_us
    else:
        apart = p_value <= FALSE_RATE
    large = max(a_us, b_us) > LARGE_FACTOR * min(a_us, b_us)
    verdict = NOT_SHOWN
    if a_us != b_us and (stands or (large and apart)):
        verdict = FASTER if b_us < a_us else SLOWER
    return Comparison(key, launches, a_us, b_us, p_value, verdict)


def shown_verdict(one: Comparison) -> str:
    """Return the verdict, with a remark if a side has one launch."""
    known = one.verdict != NOT_SHOWN and min(one.launches) == 1
    return f"{one.verdict}, one launch" if known else one.verdict


def lines(found) -> str:
    """Return the comparisons as a table; ratio: B's time over A's."""
    rows = []
    for one in found:
        key = dict(zip(KEY, one.key, strict=True))
        rows.append(
            {
                "case": key["case"],
                "via": key["via"],
                "ranks": ",".join(map(str, key["ranks"])),
                "mode": key["mode"] or "-",
                "size_B": key["size_bytes"],
                "launches": "+".join(map(str, one.launches)),
                "A_us": f"{one.a_us:.2f}",
                "B_us": f"{one.b_us:.2f}",
                "ratio": f"{one.b_us / one.a_us:.3f}",
                "p": f"{one.p_value:.4f}",
                "B is": shown_verdict(one),
            }
        )
    return results.text_table(rows, left=4)


def too_few(found) -> tuple[list[str], list[str]]:
    """Return remarks: numbers of launches that can show nothing, and that show little."""
    nothing, little = [], []
    for a, b in sorted({one.launches for one in found}):
        least = 2 / math.comb(a + b, a)
        if least <= FALSE_RATE:
            continue
        cure = "measure both with --launches 5 or more"
        if 1 in (a, b):
            little.append(
                f"{a} and {b} launches show only factors above {LARGE_FACTOR:g}, and "
                f"these may be the launches' own: {cure}"
            )
        else:
            nothing.append(
                f"{a} and {b} launches can show nothing (p is {least:.2g} at least): {cure}"
            )
    return nothing, little


def add_flags(parser) -> None:
    """Add the flags for both files, and for the exit code."""
    parser.add_argument("a", metavar="A", help="file of bench.interconnect --launches K --json")
    parser.add_argument("b", metavar="B", help="the same operations, measured otherwise")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a row is slower in B, or is not in B"
    )


def show(args, session) -> int:
    """Print one line for each operation in both files; with --check 1 if B lacks or slows one."""
    a_rows, b_rows = (records.rows_of([one], tell=True) for one in (args.a, args.b))
    found = compare_rows(a_rows, b_rows)
    if not found:
        raise DataError(
            f"{args.a} and {args.b} have no operation in common: run the same cases, "
            "sizes and ranks with the same --buffers and --sync for both"
        )
    print(lines(found))
    nothing, little = too_few(found)
    if args.check and nothing:
        raise UsageError([f"--check: {warning}" for warning in nothing])
    print("".join(f"{warning}\n" for warning in nothing + little), end="", file=sys.stderr)
    slower = [one for one in found if one.verdict == SLOWER]
    lost = Counter(
        key[KEY.index("case")] for key in by_operation(a_rows).keys() - by_operation(b_rows).keys()
    )
    if args.check:
        print(f"{len(slower)} of {len(found)} rows are slower in B")
        for case, count in sorted(lost.items()):
            print(f"not in B: {counted(count, 'row')} of {case}")
    return EXIT_CHECK_FAILED if args.check and (slower or lost) else EXIT_OK


main = Program("compare", __doc__, show, json=None, add=add_flags).started(__name__)
