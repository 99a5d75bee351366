"""What the samples of a benchmark say: pure functions of arrays, no MPI, no clocks.

A sample is one iteration: when each rank entered and left it, on one clock. Nothing is averaged
over ranks: the time of an iteration is last exit minus first entry. Where iterations follow each
other without a common start, it is last exit minus the last exit before. Spread is given by order
statistics, which assume no distribution.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np

FIRST_ALONE = ("latency", "bandwidth", "bidirectional")  # only the first rank's clock counts, as
# in OSU's point-to-point tests
EACH_ALONE = "noise"  # nothing is sent: the slowest rank's own time counts
EXACT_SPLITS = 20_000  # of two sets of launches: up to here every split is counted

# Bus bandwidth over algorithm bandwidth for P ranks: what the busiest link carries per byte of the
# result. Source: PERFORMANCE.md of nccl-tests.
BUS_FACTORS = {
    **dict.fromkeys(("all-reduce", "iall-reduce", "reduce-scatter+all-gather",
                     "two-level-all-reduce"), lambda ranks: 2 * (ranks - 1) / ranks),
    **dict.fromkeys(("all-gather", "reduce-scatter", "all-to-all", "all-to-allv", "gather",
                     "scatter"), lambda ranks: (ranks - 1) / ranks),
    **dict.fromkeys(("multi-bandwidth", "bisection"), lambda ranks: 1 / (ranks // 2)),  # one pair's
}


def bus_factor(case: str, ranks: int) -> float:
    """busbw / algbw; 1 where it is not listed. case: a title that begins with its name."""
    name = case.split(maxsplit=1)[0]
    return BUS_FACTORS[name](ranks) if name in BUS_FACTORS else 1.0


def iteration_ns(entered, left):
    """(n, ranks), (n, ranks) -> (n,): last exit minus first entry."""
    return left.max(axis=1) - entered.min(axis=1)


def back_to_back_ns(entered, left):
    """(n, ranks), (n, ranks) -> (n,): last exit minus the last exit before.

    The first iteration of a batch counts from its first entry.
    """
    ends = left.max(axis=1)
    return ends - np.maximum(entered.min(axis=1), np.concatenate([entered[:1].min(1), ends[:-1]]))


def times_us(row: dict) -> np.ndarray:
    """Times in us of a row's iterations that count, each for one operation, from the samples."""
    entered, left = np.array(row["entered_ns"]), np.array(row["left_ns"])
    if row["case"].removeprefix("pairs ") in FIRST_ALONE:
        entered, left = entered[:, :1], left[:, :1]
    if row["case"] == EACH_ALONE:
        times = (left - entered).max(axis=1)
    else:
        times = (back_to_back_ns if row["sync"] == "none" else iteration_ns)(entered, left)
    return np.delete(times, row["late_at"]) * 1e-3 / row["per_sample"]


def skew_us(row: dict) -> float:
    """Median distance of the ranks' starts; 0 where one clock counts, or without a common start."""
    if row["case"].removeprefix("pairs ") in FIRST_ALONE or row["sync"] == "none":
        return 0.0
    entered = np.delete(np.array(row["entered_ns"]), row["late_at"], axis=0)
    return float(np.median(entered.max(axis=1) - entered.min(axis=1))) * 1e-3


def last_share(times) -> tuple[int, float]:
    """(n, ranks) -> the column that most often holds the row's largest value, and how often."""
    last = np.bincount(times.argmax(axis=1), minlength=times.shape[1])
    return int(last.argmax()), float(last.max() / last.sum())


def median_interval(samples, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of the median from order statistics; min and max below six samples.

    Source: J.-Y. Le Boudec, Performance Evaluation of Computer and Communication Systems, sec. 2.2.
    """
    ordered = np.sort(np.asarray(samples, float))
    count = len(ordered)
    if count < 6:
        return float(ordered[0]), float(ordered[-1])
    low = max(0, math.floor((count - z * math.sqrt(count)) / 2) - 1)
    high = min(count - 1, math.ceil(1 + (count + z * math.sqrt(count)) / 2) - 1)
    return float(ordered[low]), float(ordered[high])


def half_width(samples) -> float:
    """Half the median's 95 % interval as a share of the median."""
    low, high = median_interval(samples)
    middle = float(np.median(samples))
    return (high - low) / 2 / middle if middle else math.inf


def summary(times_us) -> dict:
    """Columns of a row from the times of its iterations in microseconds."""
    times_us = np.asarray(times_us, float)
    low, high = median_interval(times_us)
    p5, p95, p99 = np.percentile(times_us, (5, 95, 99))
    return {
        "iterations": len(times_us), "median_us": float(np.median(times_us)), "p5_us": float(p5),
        "p95_us": float(p95), "p99_us": float(p99), "max_us": float(times_us.max()),
        "low_us": low, "high_us": high,
    }


def bandwidths(case: str, ranks: int, nbytes: float, median_us: float) -> dict:
    """algbw and busbw in GB/s (1e9): bytes over the median time, never a mean of rates."""
    alg = nbytes / median_us * 1e-3 if median_us else 0.0
    return {"algbw_GBps": alg, "busbw_GBps": alg * bus_factor(case, ranks)}


def rank_sum(a, b) -> float:
    """Two-sided p-value of the Wilcoxon-Mann-Whitney rank-sum test; ties get mean ranks.

    It is exact while there are few ways to split the values, else a normal approximation.
    """
    values = np.concatenate([a, b]).astype(float)
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(1, len(values) + 1)
    for value in np.unique(values):
        ranks[values == value] = ranks[values == value].mean()
    count, total = len(a), len(values)
    expected = count * (total + 1) / 2
    off = abs(ranks[:count].sum() - expected)
    if math.comb(total, count) <= EXACT_SPLITS:
        splits = [abs(sum(split) - expected) for split in combinations(ranks, count)]
        return float(np.mean(np.array(splits) >= off - 1e-9))
    spread = math.sqrt(ranks.var() * total / (total - 1) * count * (total - count) / total)
    return math.erfc(max(0.0, off - 0.5) / spread / math.sqrt(2)) if spread else 1.0


def discoveries(p_values, rate: float = 0.05) -> list[bool]:
    """Which of many tests hold if at most `rate` of those found may be false.

    Source: Benjamini and Hochberg 1995, the step-up rule.
    """
    p_values = np.asarray(p_values, float)
    order = np.argsort(p_values)
    limits = rate * np.arange(1, len(p_values) + 1) / max(1, len(p_values))
    passing = np.nonzero(p_values[order] <= limits)[0]
    accepted = np.zeros(len(p_values), bool)
    if len(passing):
        accepted[order[: passing[-1] + 1]] = True
    return accepted.tolist()
