"""What a cost model of the machine says of a row of bench.interconnect."""

from __future__ import annotations

from bench.interconnect.cases import COMM
from bench.interconnect.messages import microbatches
from mpipar.errors import UsageError
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.pipeline.simulate import simulate
from mpipar.plan.machine import HOP, Estimate, Machine

CHAIN, BOTH_WAYS = "stage-chain 1f1b", "bidirectional"


def predicted(machine: Machine, row: dict) -> Estimate:
    """The estimate for a row; a chain's messages are simulated.

    A chain's pass takes as long as its messages keep the rank busy: half of one sent and one
    received. Raises UsageError where the model was not measured.
    """
    nbytes, ranks, link = row["size_bytes"], len(row["ranks"]), row["link"]
    if row["case"] != CHAIN:
        return machine.estimate(row["case"].removeprefix("pairs "), nbytes, ranks, link)
    hop, busy = (machine.estimate(operation, nbytes, link=link) for operation in (HOP, BOTH_WAYS))
    schedule = make_schedule("1f1b", ranks, microbatches(ranks))
    costs = Costs(f=busy.seconds / 2, i=busy.seconds / 2, w=0,
                  latency=max(0.0, hop.seconds - busy.seconds / 2))
    return Estimate(float(simulate(schedule, costs).makespan), hop.extrapolated)


def holds(machine: Machine, row: dict) -> bool:
    """Whether the model covers what a row measured.

    It covers calls through mpipar.comm, one group at a time. Transport, type and buffers must be
    those that it was fitted to.
    """
    fitted = machine.provenance
    return (row["via"] == COMM and row["mode"] != "together" and row["sync"] != "none"
            and row["buffers"] in fitted.get("buffers", ())
            and all(row[name] == fitted.get(name) for name in ("transport", "dtype")))


def beside(machine: Machine, row: dict) -> dict:
    """predicted_us and measured_over_predicted of a row.

    The result is {} where the model does not hold, or where the size is outside the measured range.
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
