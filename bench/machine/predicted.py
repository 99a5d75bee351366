"""Compares a machine's cost model with the rows of bench.interconnect, and judges its errors.

It also composes the time of an all-reduce by each of its algorithms from messages and local sums.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from bench.interconnect.cases import COMM
from bench.interconnect.messages import microbatches
from mpipar.console.tables import table
from mpipar.errors import UsageError
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.pipeline.simulate import simulate
from mpipar.plan.machine import HOP, Estimate, Machine

CHAIN, BOTH_WAYS = "stage-chain 1f1b", "bidirectional"


def predicted(machine: Machine, row: dict) -> Estimate:
    """Return the estimate for a row; a chain's messages are simulated.

    A chain's pass takes as long as its messages keep the rank busy: half of one sent and one
    received. Raises UsageError if the model was not measured.
    """
    nbytes, ranks, link = row["size_bytes"], len(row["ranks"]), row["link"]
    if row["case"] != CHAIN:
        return machine.estimate(row["case"].removeprefix("pairs "), nbytes, ranks, link)
    hop, busy = (machine.estimate(operation, nbytes, link=link) for operation in (HOP, BOTH_WAYS))
    schedule = make_schedule("1f1b", ranks, microbatches(ranks))
    costs = Costs(
        f=busy.seconds / 2,
        i=busy.seconds / 2,
        w=0,
        latency=max(0.0, hop.seconds - busy.seconds / 2),
    )
    return Estimate(float(simulate(schedule, costs).makespan), hop.extrapolated)


def holds(machine: Machine, row: dict) -> bool:
    """Return whether the model covers what a row measured.

    It covers calls through mpipar.comm, one group at a time. Transport, type and buffers must be
    those that it was fitted to.
    """
    fitted = machine.provenance
    return (
        row["via"] == COMM
        and row["mode"] != "together"
        and row["sync"] != "none"
        and row["buffers"] in fitted.get("buffers", ())
        and all(row[name] == fitted.get(name) for name in ("transport", "dtype"))
    )


def beside(machine: Machine, row: dict) -> dict:
    """Return predicted_us and measured_over_predicted of a row.

    The result is {} if the model does not cover it, or if the size is outside the measured range.
    """
    if not holds(machine, row):
        return {}
    try:
        estimate = predicted(machine, row)
    except UsageError:
        return {}
    if estimate.extrapolated:
        return {}
    us = estimate.seconds * 1e6
    return {"predicted_us": us, "measured_over_predicted": row["median_us"] / us}


def all_reduce_models(hop, reduction, nbytes: float, ranks: int) -> dict[str, float]:
    """Return {algorithm: time}. hop(bytes), reduction(bytes) -> time of a message and of a local
    sum.

    The last two formulas hold for powers of two; other numbers of ranks are rounded up to the next.
    Source: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations, 2005.
    """
    part, logs = nbytes / ranks, math.ceil(math.log2(ranks))
    halves = [nbytes / 2 ** (k + 1) for k in range(logs)]
    return {
        "ring": (ranks - 1) * (2 * hop(part) + reduction(part)),
        "recursive doubling": logs * (hop(nbytes) + reduction(nbytes)),
        "Rabenseifner": sum(2 * hop(half) + reduction(half) for half in halves),
    }


OPERATION_TOLERANCE, STEP_TOLERANCE = 0.10, 0.15


class Subject(NamedTuple):
    """What is compared: an operation, a chain, a formula or a step, on a number of ranks."""

    what: str
    ranks: int
    link: str


def line(
    subject: Subject,
    detail: str,
    predicted_us: float,
    measured_us: float,
    extrapolated: bool = False,
) -> dict:
    """Return one comparison as a row."""
    return {
        **subject._asdict(),
        "detail": detail,
        "predicted_us": predicted_us,
        "measured_us": measured_us,
        "error": predicted_us / measured_us - 1,
        "extrapolated": extrapolated,
    }


def judge(lines, step_tolerance: float = STEP_TOLERANCE) -> list[dict]:
    """Return, for each subject, median and largest error, tolerance, and whether it is kept."""
    found: dict = {}
    for one in lines:
        subject = Subject(one["what"], one["ranks"], one["link"])
        found.setdefault(subject, []).append(abs(one["error"]))
    return [
        {
            **subject._asdict(),
            "cases": len(errors),
            "median_error": statistics.median(errors),
            "largest_error": max(errors),
            "tolerance": (tolerance := tolerance_of(subject.what, step_tolerance)) or "-",
            "verdict": verdict(statistics.median(errors), tolerance),
        }
        for subject, errors in found.items()
    ]


def verdict(error: float, tolerance: float | None) -> str:
    """Return "kept" or "NOT KEPT"; "information" without a tolerance."""
    if tolerance is None:
        return "information"
    return "kept" if error <= tolerance else "NOT KEPT"


def tolerance_of(what: str, step_tolerance: float) -> float | None:
    """Return the tolerated error; None for mere information: a chain, formulas, products."""
    if what.startswith("step"):
        return step_tolerance
    information = what.startswith(("stage-chain", "all-reduce as", "product"))
    return None if information else OPERATION_TOLERANCE


def shown(lines, verdicts) -> str:
    """Return a table of the comparisons, and below it one of the verdicts."""
    rows = [("what", "link", "ranks", "size", "predicted_us", "measured_us", "error", "")]
    rows += [
        (
            one["what"],
            one["link"],
            one["ranks"],
            one["detail"],
            f"{one['predicted_us']:.2f}",
            f"{one['measured_us']:.2f}",
            f"{one['error']:+.1%}",
            "extrapolated" if one["extrapolated"] else "",
        )
        for one in lines
    ]
    ends = [("what", "link", "ranks", "cases", "median error", "largest", "tolerance", "")]
    ends += [
        (
            one["what"],
            one["link"],
            one["ranks"],
            one["cases"],
            f"{one['median_error']:.1%}",
            f"{one['largest_error']:.1%}",
            "-" if one["tolerance"] == "-" else f"{one['tolerance']:.0%}",
            one["verdict"],
        )
        for one in verdicts
    ]
    return f"{table(rows, left=2)}\n\n{table(ends, left=2)}"
