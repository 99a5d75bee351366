"""Fits time = latency + size * time per byte in pieces: pure functions of arrays, no MPI.

Errors are relative to the time, so that small messages matter as much as large ones. Neither
parameter may be negative. Dynamic programming places the breaks between pieces, and the Bayesian
information criterion chooses their number. A break stays only if most bootstrap resamples have it.

Rows of bench.interconnect become the values of the cost model.
"""

from __future__ import annotations

import statistics
from itertools import pairwise

import numpy as np

from bench.interconnect import findings
from bench.interconnect.cases import BARE, COMM
from bench.interconnect.statistics import times_us
from mpipar.console.tables import table
from mpipar.plan.machine import Contention, Curve, Duplex, Machine, Piece

HUBER = 1.345  # of residuals over their robust spread
LEAST_SIZES, MOST_PIECES = 3, 4
NOISE = 1e-3  # relative: the floor of a fit's assumed error
RESAMPLES = 200


def line(sizes, times, weights) -> tuple[float, float]:
    """Return (latency, time per byte) by weighted least squares with both >= 0."""
    sw, sx, sy = weights.sum(), weights @ sizes, weights @ times
    sxx, sxy = weights @ sizes**2, weights @ (sizes * times)
    determinant = sw * sxx - sx * sx
    if determinant > 1e-12 * sw * sxx:
        slope = (sw * sxy - sx * sy) / determinant
        start = (sy - slope * sx) / sw
        if slope >= 0 and start >= 0:
            return float(start), float(slope)
        if start < 0:
            return 0.0, float(sxy / sxx)
    return float(sy / sw), 0.0


def robust_line(sizes, times) -> tuple[float, float]:
    """Return (latency, time per byte) of a relative Huber fit by reweighting."""
    sizes, times = np.asarray(sizes, float), np.asarray(times, float)
    base = weights = 1 / times**2
    for _ in range(20):
        start, slope = line(sizes, times, weights)
        residuals = np.abs(start + slope * sizes - times) / times
        spread = max(1.4826 * float(np.median(residuals)), NOISE)
        weights = base * np.minimum(1, HUBER * spread / np.maximum(residuals, 1e-12))
    return start, slope


def segment_costs(sizes, times):
    """Return (n, n): squared relative error of the best line through i..j; inf for too few."""
    count = len(sizes)
    weights = 1 / times**2
    costs = np.full((count, count), np.inf)
    for first in range(count):
        for last in range(first + LEAST_SIZES - 1, count):
            part = slice(first, last + 1)
            start, slope = line(sizes[part], times[part], weights[part])
            residuals = (start + slope * sizes[part] - times[part]) / times[part]
            costs[first, last] = residuals @ residuals
    return costs


def best_breaks(sizes, times) -> tuple[int, ...]:
    """Return the indices at which a new piece begins, by dynamic programming and BIC."""
    sizes, times = np.asarray(sizes, float), np.asarray(times, float)
    count = len(sizes)
    costs = segment_costs(sizes, times)
    best = {1: (costs[0].copy(), [()] * count)}
    for pieces in range(2, MOST_PIECES + 1):
        before, paths = best[pieces - 1]
        total, chosen = np.full(count, np.inf), [()] * count
        for last in range(count):
            for first in range(LEAST_SIZES, last + 1):
                cost = before[first - 1] + costs[first, last]
                if cost < total[last]:
                    total[last], chosen[last] = cost, (*paths[first - 1], first)
        best[pieces] = total, chosen
    scores = {}
    for pieces, (total, chosen) in best.items():
        if np.isfinite(total[-1]):
            error = max(total[-1] / count, NOISE**2)
            scores[chosen[-1]] = count * np.log(error) + (3 * pieces - 1) * np.log(count)
    return min(scores, key=scores.get) if scores else ()


def resampled_medians(samples, rng, resamples: int):
    """Return (resamples,) medians of bootstrap samples: launches, then samples inside a launch.

    samples: an array of times for each launch. The median of a bootstrap sample of n values is the
    quantile at a Beta((n+1)/2, (n+1)/2) variate.
    """
    medians = []
    for one in samples:
        half = (len(one) + 1) / 2
        medians.append(np.quantile(one, rng.beta(half, half, resamples)))
    medians = np.array(medians)  # (launches, resamples)
    picks = rng.integers(len(samples), size=medians.shape)
    return np.median(np.take_along_axis(medians, picks, axis=0), axis=0)


def stable_breaks(sizes, times, resampled) -> tuple[int, ...]:
    """Return the breaks of the medians that most resamples have too, give or take one size."""
    breaks = best_breaks(sizes, times)
    if not breaks:
        return ()
    votes = dict.fromkeys(breaks, 0)
    tries = resampled[:, :20].T
    for one in tries:
        found = best_breaks(sizes, one)
        for place in breaks:
            votes[place] += any(abs(place - other) <= 1 for other in found)
    return tuple(place for place in breaks if 2 * votes[place] > len(tries))


def fit(operation: str, link: str, ranks: int, data: dict, seed: int = 0) -> Curve:
    """Return the curve through {size: [times in us of each launch]}; at least three sizes.

    Its held-out error comes from a second fit to every other size, tested on the sizes between.
    """
    sizes = np.array(sorted(data), float)
    rng = np.random.default_rng(seed)
    resampled = np.array([resampled_medians(data[size], rng, RESAMPLES) for size in sorted(data)])
    times = np.array([np.median([np.median(one) for one in data[size]]) for size in sorted(data)])
    breaks = stable_breaks(sizes, times, resampled)
    pieces = fitted_pieces(sizes, times, breaks, resampled)
    median, worst = held_out(sizes, times)
    samples = sum(len(one) for launches in data.values() for one in launches)
    return Curve(operation, link, ranks, tuple(map(int, sizes)), pieces, samples, median, worst)


def fitted_pieces(sizes, times, breaks, resampled) -> tuple[Piece, ...]:
    """Return a line for each range, with its parameters' 95 % intervals over the resamples."""
    pieces, ends = [], (0, *breaks, len(sizes))
    for first, end in pairwise(ends):
        part = slice(first, end)
        start, slope = robust_line(sizes[part], times[part])
        redone = np.array([robust_line(sizes[part], one[part]) for one in resampled.T])
        low, high = np.percentile(redone, (2.5, 97.5), axis=0)
        left = 0.0 if first == 0 else float(np.sqrt(sizes[first - 1] * sizes[first]))
        right = (
            float(sizes[-1]) if end == len(sizes) else float(np.sqrt(sizes[end - 1] * sizes[end]))
        )
        pieces.append(
            Piece(
                left,
                right,
                start,
                float(min(low[0], start)),
                float(max(high[0], start)),
                slope,
                float(min(low[1], slope)),
                float(max(high[1], slope)),
            )
        )
    return tuple(pieces)


def held_out(sizes, times) -> tuple[float | None, float | None]:
    """Return median and largest relative error at odd places of a fit to the even ones."""
    if len(sizes) < 2 * LEAST_SIZES:
        return None, None
    kept, kept_times = sizes[::2], times[::2]
    breaks = best_breaks(kept, kept_times)
    pieces = fitted_pieces(kept, kept_times, breaks, kept_times[:, None])
    curve = Curve("", "", 0, tuple(map(int, kept)), pieces, 0)
    inside = sizes[1::2] <= kept[-1]
    predicted = np.array([curve.estimate(size).seconds * 1e6 for size in sizes[1::2][inside]])
    errors = np.abs(predicted / times[1::2][inside] - 1)
    return float(np.median(errors)), float(errors.max())


SMALL_BYTES, LARGE_BYTES = 1024, 1 << 20
REDUCTION = "reduce-local"


def quietest(rows) -> list[dict]:
    """Return the rows with the lowest median of each operation and size in one launch."""
    found: dict = {}
    for row in rows:
        key = (
            row.get("launch"),
            row["case"],
            row["via"],
            row["axis"],
            row["mode"],
            tuple(row["ranks"]),
            row["size_bytes"],
        )
        if key not in found or row["median_us"] < found[key]["median_us"]:
            found[key] = row
    return list(found.values())


def fittable(rows) -> dict:
    """Return {(operation, link, ranks): {size: [times in us]}} with three sizes or more.

    A barrier, which has no size, is included. Only operations through mpipar.comm count, on all
    ranks or alone, because training calls those. Rows measured in turn with computing do not count.
    """
    data: dict = {}
    for row in rows:
        if (
            row["via"] == COMM
            and row["mode"] != "together"
            and "num_tests" not in row
            and "stage-chain" not in row["case"]
        ):
            key = (row["case"].removeprefix("pairs "), row["link"], len(row["ranks"]))
            data.setdefault(key, {}).setdefault(row["size_bytes"], []).append(times_us(row))
    return {
        key: sizes
        for key, sizes in sorted(data.items())
        if len(sizes) >= LEAST_SIZES or set(sizes) == {0}
    }


def curves(rows) -> list[Curve]:
    """Return a curve for each operation, kind of link and number of ranks that can be fitted."""
    return [
        barrier(key, sizes[0]) if set(sizes) == {0} else fit(*key, sizes)
        for key, sizes in fittable(rows).items()
    ]


def barrier(key, launches) -> Curve:
    """Return the curve of a barrier, which has no size: the median of its launches' medians."""
    medians = [float(np.median(times)) for times in launches]
    middle = statistics.median(medians)
    piece = Piece(0.0, 0.0, middle, min(medians), max(medians), 0.0, 0.0, 0.0)
    return Curve(*key, (0,), (piece,), sum(map(len, launches)))


def duplex(rows) -> tuple[Duplex, ...]:
    """Return two-way over twice the one-way bandwidth, by link: median of sizes from 1 MiB on."""
    rates: dict = {}
    for row in rows:
        if row["via"] == COMM and row["size_bytes"] >= LARGE_BYTES and row["axis"] == "pair":
            key = (row["link"], row.get("launch"), row["size_bytes"])
            rates.setdefault(key, {})[row["case"]] = row["algbw_GBps"]
    factors: dict = {}
    for (link, *_), both in rates.items():
        if {"bandwidth", "bidirectional"} <= both.keys():
            factor = both["bidirectional"] / (2 * both["bandwidth"])
            factors.setdefault(link, []).append(factor)
    return tuple(Duplex(link, statistics.median(values)) for link, values in factors.items())


def contention(rows) -> tuple[Contention, ...]:
    """Return the time of a layout's groups together over alone, through mpipar.comm.

    It is the median of launches.
    """
    launches: dict = {}
    for row in rows:
        if row["via"] == COMM:
            launches.setdefault(row.get("launch"), []).append(row)
    factors: dict = {}
    for own in launches.values():
        for one in findings.contention(own):
            key = (one["case"], one["axis"], one["size_bytes"])
            factors.setdefault(key, []).append(one["contention"])
    return tuple(Contention(*key, statistics.median(found)) for key, found in factors.items())


def overhead(rows) -> float | None:
    """Return the microseconds that one call through mpipar.comm adds: a hop is a send and a
    receive.
    """
    both: dict = {}
    for row in rows:
        if row["case"] == "latency" and row["size_bytes"] <= SMALL_BYTES:
            key = (row.get("launch"), tuple(row["ranks"]), row["size_bytes"])
            both.setdefault(key, {})[row["via"]] = row["median_us"]
    found = [(pair[COMM] - pair[BARE]) / 2 for pair in both.values() if {COMM, BARE} <= set(pair)]
    return statistics.median(found) if found else None


def rate(us_per_byte: float) -> str:
    """Return the rate as text, in GB/s (1e9 bytes per second)."""
    return f"{1e-3 / us_per_byte:.3g}" if us_per_byte else "-"


def describe_machine(machine: Machine) -> str:
    """Return the fitted pieces as a table, and the other numbers."""
    rows = [
        (
            "operation",
            "link",
            "ranks",
            "from_bytes",
            "to_bytes",
            "latency_us",
            "95 %",
            "GB/s",
            "95 %",
            "held out",
        )
    ]
    for curve in machine.curves:
        for number, piece in enumerate(curve.pieces):
            error = (
                ""
                if curve.held_out_median is None or number
                else (f"{curve.held_out_median:.1%} max {curve.held_out_max:.0%}")
            )
            rows.append(
                (
                    curve.operation,
                    curve.link,
                    curve.ranks,
                    round(piece.from_bytes),
                    round(piece.to_bytes),
                    f"{piece.latency_us:.2f}",
                    f"{piece.latency_low_us:.2f}..{piece.latency_high_us:.2f}",
                    rate(piece.us_per_byte),
                    f"{rate(piece.us_per_byte_high)}..{rate(piece.us_per_byte_low)}",
                    error,
                )
            )
    lines = [table(rows, left=2)]
    lines += [f"duplex factor, {one.link}: {one.factor:.2f}" for one in machine.duplex]
    for operation in dict.fromkeys(one.operation for one in machine.contention):
        lines.append(f"contention of {operation}: {machine.contention_factor(operation):.2f}")
    if machine.call_overhead_us is not None:
        lines.append(f"a call through mpipar.comm: {machine.call_overhead_us:.2f} us above mpi4py")
    if machine.products:
        best = max(2 * one.m * one.k * one.n / one.seconds for one in machine.products)
        lines.append(f"products: up to {best * 1e-9:.1f} GFLOP/s on each rank")
    for units in machine.units:
        block = sum((units.block.f, units.block.i, units.block.w))
        lines.append(
            f"passes of {units.rows} row(s), tp {units.tp}: {block * 1e3:.2f} ms for a "
            f"block, {units.update_seconds_per_parameter * 1e9:.2f} ns per parameter and "
            "update"
        )
        if units.sharing > 1:
            lines[-1] += f", {units.sharing:.2f} times as much core time where ranks share it"
    return "\n".join(lines)
