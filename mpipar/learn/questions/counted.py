"""Sources of the answers: predicted ranks, simulated schedules, messages of a ring."""

from __future__ import annotations

import math
from fractions import Fraction

from mpipar import ops as ops_module
from mpipar.comm.grid import AXES, Grid
from mpipar.comm.groups import Comms
from mpipar.comm.record import Recorder
from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.partition import ring
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.pipeline.simulate import Timeline, simulate
from mpipar.plan.predict import Prediction, predict

MIB = 1 << 20


def configured(**values):
    """Return a resolved Config of these flags, on as many ranks as its layout has.

    Axes default to 1.
    """
    values = dict.fromkeys(AXES, 1) | values
    return resolve(build(values), math.prod(values[axis] for axis in AXES))[0]


def predicted(world_rank: int = 0, **values) -> Prediction:
    """Return what `mpipar explain` computes for a rank with these flags."""
    return predict(configured(**values), world_rank)


def barriers(prediction: Prediction, axis: str) -> int:
    """Return how many barriers of an axis a rank passes in a step."""
    return sum(record.axis == axis for record in prediction.recorder.records)


def sent(prediction: Prediction, axis: str) -> int:
    """Return how many bytes a rank sends over an axis in a step."""
    return sum(record.wire_bytes for record in prediction.recorder.records if record.axis == axis)


def simulated(
    name: str, p: int, m: int, chunks: int | None = None, costs=(1, 1, 1), hop=0
) -> Timeline:
    """Simulate a schedule's step. costs: F, I and W of a worker's layers, shared by its chunks."""
    costs = Costs(*map(Fraction, costs), latency=Fraction(hop))
    return simulate(make_schedule(name, p, m, chunks), costs.divided(chunks or 1))


def bubble_percent(timeline: Timeline) -> float:
    """Return the idle share of all workers' time, in percent."""
    return 100 * timeline.bubble_share


def ring_messages(nbytes: int, ranks: int) -> list[int]:
    """Return the bytes of each message of a rank in a ring all-reduce, counted on shapes."""
    recorder = Recorder()
    ops = ops_module.make("shapes", "float32", recorder)
    comm = Comms(Grid(0, {"tp": ranks}), ops, recorder)["tp"]
    piece = (nbytes // 4 // ranks,)
    total = ring.total(ops, lambda place: ops.empty(piece), comm, "sum")
    for _ in ring.pieces(ops, total, comm, "piece"):
        pass
    return [one.payload_bytes for one in recorder.records if one.operation == "send"]
