"""Findings from several rows: contention of groups, broken guidelines, slow pairs.

`say` prints what the rows of a benchmark show together, of one launch or of several.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bench import results, table
from bench.interconnect.between import combined
from bench.interconnect.cases import BARE, BARE_PARTS, BARE_UNEVEN, BY, COMM
from bench.interconnect.noise import Noise, noise_lines

LEAST_FACTOR = 1.1  # smaller gains are not worth changing the program
SLOW_PAIR = 2.0  # times the median pair
SAME_SIZE = 0.02  # rounding to a multiple of the ranks changes a size by no more than this

# left <= sum of right, each (case, way or None for the same way). A library that breaks one has a
# cheaper way to do the same thing. Source: Traeff, Gropp, Thakur, Self-consistent MPI performance
# guidelines, TPDS 2010.
GUIDELINES = (
    (("all-reduce", None), (("reduce-scatter", None), ("all-gather", None))),
    *((("all-reduce", COMM), (("all-reduce", via),)) for via in BY),
    (("reduce-scatter", BARE), (("reduce-scatter", BARE_UNEVEN),)),
    (("reduce-scatter", None), (("all-reduce", None),)),
    (("all-gather", None), (("all-to-all", None),)),
    (("broadcast", None), (("all-reduce", None),)),
    (("iall-reduce", None), (("all-reduce", None),)),
    (("all-reduce", None), (("reduce", None), ("broadcast", None))),
    (("reduce", None), (("all-reduce", None),)),
    (("gather", BARE), (("all-gather", BARE),)),
    (("all-gather", BARE), (("gather", BARE), ("broadcast", BARE))),
    (("scatter", BARE), (("broadcast", BARE),)),
    (("broadcast", BARE), (("scatter", BARE), ("all-gather", BARE))),
    (("all-to-allv", BARE), (("all-to-allv", BARE_PARTS),)),
)


class Finding(NamedTuple):
    """A broken guideline: by how much the left side is slower, and what to call instead."""

    case: str
    via: str
    size_bytes: int
    factor: float
    instead: str


def _by_way(rows) -> dict:
    """Return {group and buffers: {launch: {(case, way): {size: row}}}} without overlapped rows."""
    found: dict = {}
    for row in rows:
        if "num_tests" in row:
            continue
        key = (tuple(row["ranks"]), row["mode"], row["buffers"], row["transport"], row["sync"])
        ways = found.setdefault(key, {}).setdefault(row.get("launch"), {})
        ways.setdefault((row["case"], row["via"]), {})[row["size_bytes"]] = row
    return found


def guidelines(rows) -> list[Finding]:
    """Return the broken guidelines, the largest factors first.

    One is broken if, in every launch, the left side's lower bound is above the sum of the right's
    upper bounds. The factor is the median of the launches' factors, at least LEAST_FACTOR. Two more
    guidelines: half a message never takes longer than the whole, and the whole never longer than
    two halves.
    """
    found = []
    for by_launch in _by_way(rows).values():
        launches = [
            {one[:3] + one[4:]: one for one in _broken(ways)} for ways in by_launch.values()
        ]
        for key, one in launches[0].items():
            if all(key in launch for launch in launches):
                factors = [launch[key].factor for launch in launches]
                found.append(one._replace(factor=float(np.median(factors))))
    return sorted((one for one in found if one.factor >= LEAST_FACTOR), key=lambda one: -one.factor)


def _broken(ways) -> list[Finding]:
    """Return the guidelines that one group breaks in one launch."""
    found = _self_consistent(ways)
    for left, right in GUIDELINES:
        for via in (COMM, BARE) if left[1] is None else (left[1],):
            own = ways.get((left[0], via), {})
            others = [ways.get((case, way or via), {}) for case, way in right]
            for size in sorted(own):
                parts = [_of_size(size, other) for other in others]
                if None in parts:
                    continue
                if own[size]["low_us"] > sum(part["high_us"] for part in parts):
                    instead = " + ".join(
                        case if way is None else f"{case} ({way})" for case, way in right
                    )
                    factor = own[size]["median_us"] / sum(part["median_us"] for part in parts)
                    found.append(Finding(left[0], via, size, factor, instead))
    return found


def _of_size(size: int, rows: dict) -> dict | None:
    """Return the row of this size, give or take SAME_SIZE. None without one."""
    near = min(rows, key=lambda other: abs(other - size), default=None)
    return rows[near] if near is not None and abs(near - size) <= SAME_SIZE * size else None


def _self_consistent(ways) -> list[Finding]:
    found = []
    for (case, via), rows in ways.items():
        for size, row in sorted(rows.items()):
            double = rows.get(2 * size)
            if double is None or size == 0:
                continue
            if row["low_us"] > double["high_us"]:
                factor = row["median_us"] / double["median_us"]
                found.append(Finding(case, via, size, factor, "the same with twice the size"))
            if double["low_us"] > 2 * row["high_us"]:
                factor = double["median_us"] / (2 * row["median_us"])
                found.append(Finding(case, via, 2 * size, factor, "twice with half the size"))
    return found


def contention(rows) -> list[dict]:
    """Return how much longer a group takes while others communicate too; the worst group counts.

    For the hops of a pipeline: all hops together compared with the slowest hop alone. rows: of one
    launch.
    """
    alone: dict = {}
    for row in rows:
        if row["mode"] == "alone":
            key = (row["case"], row["axis"], row["via"], row["size_bytes"])
            alone.setdefault(key, {})[tuple(row["ranks"])] = row["median_us"]
    together: dict = {}
    for row in rows:
        if row["mode"] != "together":
            continue
        hops = row["case"].startswith("stage-chain hops")
        kind = "stage-chain hop" if hops else row["case"]
        single = alone.get((kind, row["axis"], row["via"], row["size_bytes"]), {})
        base = max(single.values(), default=0) if hops else single.get(tuple(row["ranks"]), 0)
        if base:
            key = (row["case"], row["axis"], row["via"], row["size_bytes"])
            factor = row["median_us"] / base
            if factor > together.get(key, (0, 0, 0))[0]:
                together[key] = factor, base, row["median_us"]
    return [
        {
            "case": key[0],
            "axis": key[1],
            "via": key[2],
            "size_bytes": key[3],
            "alone_us": base,
            "together_us": median,
            "contention": factor,
        }
        for key, (factor, base, median) in sorted(together.items())
    ]


def slow_pairs(rows) -> list[str]:
    """Return pairs that take over twice the median pair of their kind of link, slowest first."""
    links: dict = {}
    for row in rows:
        links.setdefault(row["link"], {})[tuple(row["ranks"])] = row["median_us"]
    found = []
    for link, times in links.items():
        middle = float(np.median(list(times.values())))
        found += [
            (time / middle, link, pair, time)
            for pair, time in times.items()
            if time > SLOW_PAIR * middle
        ]
    return [
        f"ranks {low} and {high} ({link}): {time:.1f} us, {factor:.1f} times the median pair"
        for factor, link, (low, high), time in sorted(found, reverse=True)
    ]


def two_groups(rows) -> list[str]:
    """Return the rows whose times form two groups, in words."""
    return [
        f"{row['case']}, {row['size_bytes']} bytes, {row['via']}: median {row['median_us']:.4g} us,"
        f" but {1 - row['slow_share']:.0%} of the times are near {row['fast_us']:.4g} us"
        f" and the others near {row['slow_us']:.4g} us"
        for row in rows
        if "slow_share" in row
    ]


def say(rows) -> None:
    """Print pair matrices, noise, contention, times in two groups, and broken guidelines.

    Times of several launches are their medians. Noise is that of each launch.
    """
    several = len({row.get("launch") for row in rows}) > 1
    merged = combined(rows) if several else rows
    for value, case in (("median_us", "pairs latency"), ("algbw_GBps", "pairs bandwidth")):
        for via in dict.fromkeys(row["via"] for row in merged):
            pairs = [row for row in merged if row["case"] == case and row["via"] == via]
            if pairs:
                print(
                    f"\n# {case}, {via}, {value} of {pairs[0]['size_bytes']} bytes\n"
                    + table.matrix(pairs, value)
                )
                print("\n".join(f"slow: {line}" for line in slow_pairs(pairs)), end="")
    for row in rows:
        if row["case"] == Noise.name:
            launch = f", launch {row['launch']}" if several else ""
            print(
                f"\n# noise{launch}: detours of a fixed piece of work, a second of it\n"
                + noise_lines(row)
            )
    if shared := contention(merged):
        print(f"\n# contention: together over alone\n{results.text_table(shared, left=3)}")
    if groups := two_groups(merged):
        print("\n# two groups of times: the machine has two modes, compare the fast ones")
        print("\n".join(groups))
    if broken := guidelines(rows):
        where = "every launch" if several else "this launch"
        print(
            f"\n# slower than what could replace it, in {where}\n"
            + results.text_table([one._asdict() for one in broken], left=2)
        )
