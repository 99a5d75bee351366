"""Between launches: a prediction interval for another launch's median, from a few launches.

    python -m bench.interconnect latency all-reduce --launches 30 --factor 512 --json rows.jsonl
    python -m bench.interconnect.between rows.jsonl [--write]    # --write: into bench/results/

The program checks the interval by resampling many launches: how often do five predict a sixth?

Launches differ by more than the iterations inside one, so an interval from one launch says nothing
about the next. This one is the prediction interval for one more value of a normal distribution,
taken on logarithms, because times spread by factors:

    exp(m +- t s sqrt(1 + 1/K))

m and s: mean and standard deviation of the logarithms of K medians; t: the quantile of Student's t
with K - 1 degrees of freedom. Source: Hahn and Meeker, Statistical Intervals, 1991, chapter 4.
"""

from __future__ import annotations

import math

import numpy as np

from bench.interconnect import records
from bench.interconnect.statistics import MODES, mode_columns, scipy_stats, times_us
from bench.program import Outcome, Program
from mpipar.errors import DataError

RESULT = "bench/results/launches.json"
LEAST_LAUNCHES, DRAWS = 20, 1000
SHARE = 0.95
KEY = (
    "case",
    "via",
    "transport",
    "dtype",
    "buffers",
    "axis",
    "mode",
    "ranks",
    "window",
    "size_bytes",
    "sync",
)


def quantile(degrees: int) -> float:
    """Return the two-sided quantile of Student's t for the probability SHARE."""
    return float(scipy_stats().t.ppf((1 + SHARE) / 2, degrees))


def next_launch(medians) -> tuple[float, float]:
    """Return the interval of one more launch's median. medians: of two or more launches."""
    logs = np.log(np.maximum(medians, 1e-9))
    width = quantile(len(logs) - 1) * logs.std(ddof=1) * math.sqrt(1 + 1 / len(logs))
    return math.exp(logs.mean() - width), math.exp(logs.mean() + width)


def by_operation(rows) -> dict[tuple, list[list[dict]]]:
    """Return {operation: the rows of each launch}, in order of appearance."""
    found: dict = {}
    for row in rows:
        key = tuple(tuple(row[name]) if name == "ranks" else row[name] for name in KEY)
        found.setdefault(key, {}).setdefault(row["launch"], []).append(row)
    return {key: list(launches.values()) for key, launches in found.items()}


def medians_of(launches) -> list[float]:
    """Return the median of each launch, from its rows; rounds of a launch are combined."""
    return [float(np.median([row["median_us"] for row in own])) for own in launches]


def combined(rows) -> list[dict]:
    """Return a row per operation: the median over launches, and the interval of `next_launch`.

    best_us, worst_us: of the launches' medians. within_percent: the interval inside a launch, as a
    share of its median. An operation of a single launch keeps the interval of that launch. Two
    modes are those of the times of all launches.
    """
    found = []
    for launches in by_operation(rows).values():
        values = medians_of(launches)
        first = {name: value for name, value in launches[0][0].items() if name not in MODES}
        middle = float(np.median(values))
        low, high = next_launch(values) if len(values) > 1 else (first["low_us"], first["high_us"])
        scale = first["median_us"] / middle if middle else 0.0
        rates = {
            name: first[name] * scale
            for name in ("algbw_GBps", "busbw_GBps", "messages_per_s", "bound_percent")
            if name in first
        }
        every = [row for own in launches for row in own]
        rates |= {
            name: float(np.median([row[name] for row in every if name in row]))
            for name in (
                "skew_us",
                "alone_us",
                "computing_us",
                "overlap_percent",
                "measured_over_predicted",
            )
            if name in first
        }
        within = np.median(
            [(row["high_us"] - row["low_us"]) / max(row["median_us"], 1e-9) for row in every]
        )
        found.append(
            first
            | rates
            | {
                "launches": len(values),
                "median_us": middle,
                "low_us": low,
                "high_us": high,
                "best_us": min(values),
                "worst_us": max(values),
                "within_percent": 100 * float(within),
                **mode_columns(np.concatenate([times_us(row) for row in every])),
            }
        )
    return found


def held_share(medians, draws: int = DRAWS, few: int = 5) -> float:
    """Return how often the interval of a few launches contains another one, drawn at random."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(draws):
        *some, other = rng.choice(medians, few + 1, replace=False)
        low, high = next_launch(some)
        held += low <= other <= high
    return held / draws


def measured(args, session) -> Outcome:
    """Return what many launches of the same command show."""
    lines, kept = [], {}
    for key, launches in by_operation(records.rows_of([args.file], tell=True)).items():
        one, medians = dict(zip(KEY, key, strict=True)), medians_of(launches)
        if len(medians) < LEAST_LAUNCHES:
            raise DataError(
                f"{args.file}: {len(medians)} launches, at least {LEAST_LAUNCHES} are "
                "needed: measure with --launches 30"
            )
        name = f"{one['case']}, {one['size_bytes']} bytes, {one['via']}"
        kept[name] = [round(median, 3) for median in medians]
        lines.append(
            {
                "operation": name,
                "launches": len(medians),
                "median_us": float(np.median(medians)),
                "best_us": min(medians),
                "worst_us": max(medians),
                "held_percent": 100 * held_share(medians),
            }
        )
    return Outcome(lines, beside={"medians_us": kept})


main = Program(
    "interconnect.between",
    __doc__,
    measured,
    kept=RESULT,
    add=lambda parser: parser.add_argument(
        "file", metavar="FILE", help="of bench.interconnect --launches 30 --json"
    ),
).started(__name__)
