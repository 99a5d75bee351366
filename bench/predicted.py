"""What a cost model of the machine says of a row of bench.interconnect."""

from __future__ import annotations

from bench.cases import COMM
from bench.chain import microbatches
from mpipar.errors import UsageError
from mpipar.pipeline import schedules
from mpipar.pipeline.simulate import simulate
from mpipar.plan.costs import Costs
from mpipar.plan.machine import HOP, Estimate, Machine

CHAIN, BOTH_WAYS = "stage-chain 1f1b", "bidirectional"


def predicted(machine: Machine, row: dict) -> Estimate:
    """The estimate for a row; a chain's messages are simulated. Raises UsageError: not measured.

    Its passes take what a rank is busy with for each: half of a message sent and one received.
    """
    nbytes, ranks, link = row["size_bytes"], len(row["ranks"]), row["link"]
    if row["case"] != CHAIN:
        return machine.estimate(row["case"].removeprefix("pairs "), nbytes, ranks, link)
    hop, busy = (machine.estimate(operation, nbytes) for operation in (HOP, BOTH_WAYS))
    schedule = schedules.make("1f1b", ranks, microbatches(ranks))
    costs = Costs(f=busy.seconds / 2, i=busy.seconds / 2, w=0,
                  latency=max(0.0, hop.seconds - busy.seconds / 2))
    return Estimate(float(simulate(schedule, costs).makespan), hop.extrapolated)


def beside(machine: Machine, row: dict) -> dict:
    """predicted_us and measured_over_predicted of a row, or {} where the model does not hold.

    It holds for calls through mpipar.comm with the transport, type and buffers that it was fitted
    to, one group at a time, between the sizes that were measured.
    """
    fitted = machine.provenance
    if (row["via"] != COMM or row["mode"] == "together" or row["sync"] == "none"
            or row["buffers"] not in fitted.get("buffers", ())
            or any(row[name] != fitted.get(name) for name in ("transport", "dtype"))):
        return {}
    try:
        estimate = predicted(machine, row)
    except UsageError:
        return {}
    if estimate.extrapolated:
        return {}
    us = estimate.seconds * 1e6
    return {"predicted_us": us, "measured_over_predicted": row["median_us"] / us}
