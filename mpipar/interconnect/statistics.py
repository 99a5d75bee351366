"""Statistics of a benchmark's samples: pure functions of arrays, no MPI, no clocks.

The time of a sample is last exit minus first entry of the ranks that share a clock, and of several
hosts the longest of these. Spread is given by order statistics, which assume no distribution.

Launches differ by more than the samples inside one. From three launches on, the interval is the
prediction interval for one more value of a normal distribution, taken on logarithms, because times
spread by factors: exp(m +- t s sqrt(1 + 1/K)). Source: Hahn and Meeker, Statistical Intervals,
1991, chapter 4. Two launches, or launches in two modes, say no more than their range.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

LEAST_TAIL = 100  # samples, without which there is no 99th percentile
LEAST_IN_MODE, LEAST_SHARE = 5, 0.1  # of the samples, so that a few outliers are no mode
LEAST_RATIO = 1.5  # of two modes' medians: smaller differences do not change a conclusion
STUDENT = (  # t for 95 %, two-sided, with 1, 2, ... degrees of freedom
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


def sample_us(entered: Any, left: Any, clocks: Sequence[int]) -> Any:
    """Return the time of each sample: (ranks, n), (ranks, n) -> (n,).

    clocks: of each rank, the number of its clock.
    """
    owners = np.asarray(clocks)
    spans = [
        left[owners == one].max(axis=0) - entered[owners == one].min(axis=0)
        for one in sorted(set(clocks))
    ]
    return np.max(spans, axis=0) * 1e-3


def median_interval(samples: Any, z: float = 1.96) -> tuple[float, float]:
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


def half_width(samples: Any) -> float:
    """Return half the median's 95 % interval as a share of the median."""
    low, high = median_interval(samples)
    middle = float(np.median(samples))
    return (high - low) / 2 / middle if middle else math.inf


def two_modes(times: Any) -> tuple[float, float, float] | None:
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


def summary(times_us: Any) -> dict[str, Any]:
    """Return the columns of a row from the times of its samples, each per operation."""
    times = np.asarray(times_us, float)
    low, high = median_interval(times)
    found = {
        "iterations": len(times),
        "median_us": float(np.median(times)),
        "low_us": low,
        "high_us": high,
        "min_us": float(times.min()),
        "max_us": float(times.max()),
        "p99_us": float(np.percentile(times, 99)) if len(times) >= LEAST_TAIL else None,
        "cv_percent": 100 * float(times.std() / times.mean()) if times.mean() else 0.0,
    }
    if modes := two_modes(times):
        found |= dict(zip(("fast_us", "slow_us", "slow_share"), modes, strict=True))
    return found


def next_launch(medians: Sequence[float]) -> tuple[float, float]:
    """Return where the median of one more launch should lie, from those of several launches."""
    logs = np.sort(np.log(np.maximum(medians, 1e-9)))
    count, steps = len(logs), np.diff(logs)
    alone = count > 3 and steps.max() > math.log(LEAST_RATIO)  # a launch, or some, in another mode
    if count < 3 or alone:
        return float(min(medians)), float(max(medians))
    student = STUDENT[min(count - 2, len(STUDENT) - 1)]
    width = student * logs.std(ddof=1) * math.sqrt(1 + 1 / count)
    return math.exp(logs.mean() - width), math.exp(logs.mean() + width)


KEY = ("case", "via", "transport", "dtype", "buffers", "axis", "mode", "ranks", "size_bytes")


def by_operation(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Return {operation: its row in each launch}, in order of appearance."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(tuple(row[name]) if name == "ranks" else row[name] for name in KEY)
        found.setdefault(key, []).append(row)
    return found


def combined(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per operation: the median over launches, and the interval of `next_launch`.

    An operation of a single launch keeps its row. The samples of all launches are one row's.
    """
    found = []
    for own in by_operation(rows).values():
        if len(own) == 1:
            found.append(own[0])
            continue
        medians = [row["median_us"] for row in own]
        low, high = next_launch(medians)
        middle = float(np.median(medians))
        rate = own[0]["median_us"] / middle if middle else 0.0
        times = [time for row in own for time in row["times_us"]]
        found.append(
            own[0]
            | summary(times)
            | {name: own[0][name] * rate for name in ("algbw_GBps", "busbw_GBps")}
            | {"launches": len(own), "median_us": middle, "low_us": low, "high_us": high}
            | {"best_us": min(medians), "worst_us": max(medians), "times_us": times}
        )
    return found
