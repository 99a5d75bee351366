"""Turns rows of bench.interconnect into the values of the cost model: pure functions."""

from __future__ import annotations

import statistics

import numpy as np

from bench.interconnect import findings
from bench.interconnect.cases import BARE, COMM
from bench.interconnect.statistics import times_us
from bench.machine.fitting import LEAST_SIZES, fit
from mpipar.console.tables import table
from mpipar.plan.machine import Contention, Curve, Duplex, Machine, Piece

SMALL_BYTES, LARGE_BYTES = 1024, 1 << 20
REDUCTION = "reduce-local"


def quietest(rows) -> list[dict]:
    """Of the rows of one operation and size in one launch, keep the one with the least median."""
    found: dict = {}
    for row in rows:
        key = (row.get("launch"), row["case"], row["via"], row["axis"], row["mode"],
               tuple(row["ranks"]), row["size_bytes"])
        if key not in found or row["median_us"] < found[key]["median_us"]:
            found[key] = row
    return list(found.values())


def fittable(rows) -> dict:
    """{(operation, link, ranks): {size: [times in us]}} with three sizes or more.

    A barrier, which has no size, is included. Only operations through mpipar.comm count, on all
    ranks or alone, because training calls those. Rows measured in turn with computing do not count.
    """
    data: dict = {}
    for row in rows:
        if (row["via"] == COMM and row["mode"] != "together" and "num_tests" not in row
                and "stage-chain" not in row["case"]):
            key = (row["case"].removeprefix("pairs "), row["link"], len(row["ranks"]))
            data.setdefault(key, {}).setdefault(row["size_bytes"], []).append(times_us(row))
    return {key: sizes for key, sizes in sorted(data.items())
            if len(sizes) >= LEAST_SIZES or set(sizes) == {0}}


def curves(rows) -> list[Curve]:
    """A curve for each operation, kind of link and number of ranks that can be fitted."""
    return [barrier(key, sizes[0]) if set(sizes) == {0} else fit(*key, sizes)
            for key, sizes in fittable(rows).items()]


def barrier(key, launches) -> Curve:
    """A barrier has no size: the median of its launches' medians is the whole curve."""
    medians = [float(np.median(times)) for times in launches]
    middle = statistics.median(medians)
    piece = Piece(0.0, 0.0, middle, min(medians), max(medians), 0.0, 0.0, 0.0)
    return Curve(*key, (0,), (piece,), sum(map(len, launches)))


def duplex(rows) -> tuple[Duplex, ...]:
    """Two-way over twice the one-way bandwidth, by link: median of the sizes from 1 MiB on."""
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
    """Time of a layout's groups together over alone, through mpipar.comm: median of launches."""
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
    """Microseconds that one call through mpipar.comm adds: a hop is a send and a receive."""
    both: dict = {}
    for row in rows:
        if row["case"] == "latency" and row["size_bytes"] <= SMALL_BYTES:
            key = (row.get("launch"), tuple(row["ranks"]), row["size_bytes"])
            both.setdefault(key, {})[row["via"]] = row["median_us"]
    found = [(pair[COMM] - pair[BARE]) / 2 for pair in both.values() if {COMM, BARE} <= set(pair)]
    return statistics.median(found) if found else None


def rate(us_per_byte: float) -> str:
    """The rate as text, in GB/s (1e9 bytes per second)."""
    return f"{1e-3 / us_per_byte:.3g}" if us_per_byte else "-"


def describe_machine(machine: Machine) -> str:
    """The fitted pieces as a table, and the other numbers."""
    rows = [("operation", "link", "ranks", "from_bytes", "to_bytes", "latency_us", "95 %", "GB/s",
             "95 %", "held out")]
    for curve in machine.curves:
        for number, piece in enumerate(curve.pieces):
            error = "" if curve.held_out_median is None or number else (
                f"{curve.held_out_median:.1%} max {curve.held_out_max:.0%}")
            rows.append((
                curve.operation, curve.link, curve.ranks, round(piece.from_bytes),
                round(piece.to_bytes), f"{piece.latency_us:.2f}",
                f"{piece.latency_low_us:.2f}..{piece.latency_high_us:.2f}",
                rate(piece.us_per_byte),
                f"{rate(piece.us_per_byte_high)}..{rate(piece.us_per_byte_low)}", error))
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
        lines.append(f"passes of {units.rows} row(s), tp {units.tp}: {block * 1e3:.2f} ms for a "
                     f"block, {units.update_seconds_per_parameter * 1e9:.2f} ns per parameter and "
                     "update")
        if units.sharing > 1:
            lines[-1] += f", {units.sharing:.2f} times as much of a core where ranks share it"
    return "\n".join(lines)
