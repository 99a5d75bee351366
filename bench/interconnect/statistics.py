"""Statistics of a benchmark's samples: pure functions of arrays, no MPI, no clocks.

A sample is one iteration: when each rank entered and left it, on one clock. Nothing is averaged
over ranks: the time of an iteration is last exit minus first entry. Where iterations follow each
other without a common start, it is last exit minus the previous last exit. Spread is given by order
statistics, which assume no distribution.
"""

from __future__ import annotations

import math

import numpy as np

from mpipar.errors import EnvironmentProblem

FIRST_ALONE = ("latency", "bandwidth", "bidirectional")  # only the first rank's clock counts, as
# is the case in OSU's point-to-point tests
MODES = ("fast_us", "slow_us", "slow_share")  # columns of a row whose times form two groups
EACH_ALONE = "noise"  # nothing is sent: the slowest rank's own time counts

LEAST_IN_MODE, LEAST_SHARE = 5, 0.1  # of the samples, so that a few outliers are no mode
LEAST_RATIO = 1.5  # of two modes' medians: smaller differences do not change a conclusion

# Bus bandwidth over algorithm bandwidth for P ranks: what the busiest link carries per byte of the
# result. Source: PERFORMANCE.md of nccl-tests.
BUS_FACTORS = {
    **dict.fromkeys(("all-reduce", "iall-reduce"), lambda ranks: 2 * (ranks - 1) / ranks),
    **dict.fromkeys(
        ("all-gather", "reduce-scatter", "all-to-all", "all-to-allv", "gather", "scatter"),
        lambda ranks: (ranks - 1) / ranks,
    ),
    **dict.fromkeys(("multi-bandwidth", "bisection"), lambda ranks: 1 / (ranks // 2)),  # one pair's
}


def bus_factor(case: str, ranks: int) -> float:
    """Return busbw / algbw; 1 if it is not listed. case: a title that begins with its name."""
    name = case.split(maxsplit=1)[0]
    return BUS_FACTORS[name](ranks) if name in BUS_FACTORS else 1.0


def iteration_ns(entered, left):
    """Return last exit minus first entry: (n, ranks), (n, ranks) -> (n,)."""
    return left.max(axis=1) - entered.min(axis=1)


def back_to_back_ns(entered, left):
    """Return last exit minus the previous last exit: (n, ranks), (n, ranks) -> (n,).

    The first iteration of a batch counts from its first entry.
    """
    ends = left.max(axis=1)
    return ends - np.maximum(entered.min(axis=1), np.concatenate([entered[:1].min(1), ends[:-1]]))


def times_us(row: dict) -> np.ndarray:
    """Return times in us of a row's counted iterations, each per operation, from the samples."""
    entered, left = np.array(row["entered_ns"]), np.array(row["left_ns"])
    if row["case"].removeprefix("pairs ") in FIRST_ALONE:
        entered, left = entered[:, :1], left[:, :1]
    if row["case"] == EACH_ALONE:
        times = (left - entered).max(axis=1)
    else:
        times = (back_to_back_ns if row["sync"] == "none" else iteration_ns)(entered, left)
    return np.delete(times, row["late_at"]) * 1e-3 / row["per_sample"]


def skew_us(row: dict) -> float:
    """Return the median spread of the ranks' starts; 0 with one clock or no common start."""
    if row["case"].removeprefix("pairs ") in FIRST_ALONE or row["sync"] == "none":
        return 0.0
    entered = np.delete(np.array(row["entered_ns"]), row["late_at"], axis=0)
    return float(np.median(entered.max(axis=1) - entered.min(axis=1))) * 1e-3


def last_share(times) -> tuple[int, float]:
    """Return the column of (n, ranks) that most often has its row's maximum, and how often."""
    last = np.bincount(times.argmax(axis=1), minlength=times.shape[1])
    return int(last.argmax()), float(last.max() / last.sum())


def median_interval(samples, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of the median from order statistics; min and max below six samples.

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
    """Return half the median's 95 % interval as a share of the median."""
    low, high = median_interval(samples)
    middle = float(np.median(samples))
    return (high - low) / 2 / middle if middle else math.inf


def two_modes(times) -> tuple[float, float, float] | None:
    """Return (median of the fast times, of the slow ones, share of the slow ones), or None.

    Some machines take several times as long for seconds at a time. The logarithms are cut in two
    where the variance between the groups is largest (Otsu 1979, without a histogram). These are two
    modes if the gap between them, from the 90th percentile of one to the 10th of the other, is more
    than half the distance of their medians; of a normal distribution cut in two it is a fifth.
    """
    logs = np.sort(np.log(np.maximum(np.asarray(times, float), 1e-9)))
    count, least = len(logs), max(LEAST_IN_MODE, math.ceil(LEAST_SHARE * len(logs)))
    cuts = np.arange(least, count - least + 1)
    if not len(cuts):
        return None
    sums = np.cumsum(logs)[cuts - 1]
    cut = cuts[np.argmax((sums - cuts * logs.mean()) ** 2 / (cuts * (count - cuts)))]
    fast, slow = logs[:cut], logs[cut:]
    distance = np.median(slow) - np.median(fast)
    gap = np.percentile(slow, 10) - np.percentile(fast, 90)
    if distance < math.log(LEAST_RATIO) or gap <= distance / 2:
        return None
    return math.exp(np.median(fast)), math.exp(np.median(slow)), len(slow) / count


def mode_columns(times_us) -> dict:
    """Return columns of a row whose times form two groups; {} for any other."""
    found = two_modes(times_us)
    return dict(zip(MODES, found, strict=True)) if found else {}


def summary(times_us) -> dict:
    """Return columns of a row from the times of its iterations in microseconds."""
    times_us = np.asarray(times_us, float)
    low, high = median_interval(times_us)
    p5, p95, p99 = np.percentile(times_us, (5, 95, 99))
    return {
        "iterations": len(times_us),
        "median_us": float(np.median(times_us)),
        "p5_us": float(p5),
        "p95_us": float(p95),
        "p99_us": float(p99),
        "max_us": float(times_us.max()),
        "low_us": low,
        "high_us": high,
        **mode_columns(times_us),
    }


def bandwidths(case: str, ranks: int, nbytes: float, median_us: float) -> dict:
    """Return algbw and busbw in GB/s (1e9): bytes over the median time, never a mean of rates."""
    alg = nbytes / median_us * 1e-3 if median_us else 0.0
    return {"algbw_GBps": alg, "busbw_GBps": alg * bus_factor(case, ranks)}


def rank_sum(a, b) -> float:
    """Return the two-sided p-value of the Wilcoxon-Mann-Whitney rank-sum test.

    Ties get mean ranks. It is exact for up to eight values on a side without ties, else a normal
    approximation.
    """
    p_value = scipy_stats().mannwhitneyu(a, b).pvalue
    return 1.0 if np.isnan(p_value) else float(p_value)  # nan: all values are equal


def discoveries(p_values, rate: float = 0.05) -> list[bool]:
    """Return which of many tests hold if at most `rate` of those found may be false.

    Source: Benjamini and Hochberg 1995, the step-up rule.
    """
    if not len(p_values):
        return []
    return (scipy_stats().false_discovery_control(p_values) <= rate).tolist()


def scipy_stats():
    """Return the package scipy.stats. Raises EnvironmentProblem if it is not installed."""
    try:
        from scipy import stats  # here, because it takes half a second, and ranks need none
    except ImportError:
        raise EnvironmentProblem(
            "intervals and tests between launches need the package scipy: pip install '.[bench]'"
        ) from None
    return stats
