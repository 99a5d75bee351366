"""Runs one rank's step of any layout on shapes, without MPI: the code is the cost model.

The real Worker takes one step on shapes, so memory, FLOPs, and every barrier with its bytes come
from the same lines that will run. A prediction can be wrong only about what shapes do not
determine.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpipar import ops as ops_module
from mpipar.checkpoint.save import num_elements, own_pieces
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.data import rows
from mpipar.layers.units import unit_segments
from mpipar.train.worker import Worker


@dataclass(frozen=True)
class Prediction:
    """One training step of one rank.

    peak_bytes: {label: bytes} at the moment of the largest sum. flops: {phase: FLOPs of products}.
    recorder: the records and counters of the step. groups: {axis: world ranks} of this rank.
    num_params: of its stages, without padding. segments: (groups, length) of each segment of its
    flat buffers, see `layers/flat.py`. reads: {stage: [those that a unit reads, ...]}.
    """

    world_rank: int
    peak_bytes: dict
    flops: dict
    recorder: Recorder
    groups: dict
    num_params: int
    segments: list
    reads: dict

    @property
    def peak_total(self) -> int:
        return sum(self.peak_bytes.values())


def worker_on_shapes(
    config, world_rank: int, recorder: Recorder, worst_case: bool = False
) -> Worker:
    """Return the real Worker of `world_rank` in the layout of a resolved config, on shapes.

    worst_case: see `predict`.
    """
    ops, grid = ops_module.shapes_for(config.run, recorder), Grid.of(config.grid, world_rank)
    exact, table = getattr(ops, "exact", ops), rows.routed_rows(config, grid)
    exact.worst_case = worst_case
    exact.routed = None if table is None else (table, grid.place("expert"))
    return Worker(config, grid, ops, recorder)


def predict(config, world_rank: int, worst_case: bool = False) -> Prediction:
    """Run one step of `world_rank` in the layout of a resolved config, on shapes.

    Experts are equally popular. In the worst case all rows of the
    group go to this rank's experts.
    """
    worker = worker_on_shapes(config, world_rank, Recorder(capacity=1 << 20), worst_case)
    ops = worker.ops
    if config.run.save_async and config.run.device == "cpu":  # a GPU's copy is in host memory
        elements = num_elements(own_pieces(worker))
        snapshot = ops.empty((elements,), ops.statistics, label="snapshot")  # noqa: F841 (held)
    blank_batch = rows.blank_batch
    worker.train_step(1, lambda mb: blank_batch(ops, config))
    return Prediction(
        world_rank,
        ops.peak,
        dict(ops.flops),
        worker.recorder,
        {axis: comm.ranks for axis, comm in worker.comms.groups.items()},
        sum(flat.size for flat in worker.flats),
        [
            (flat.groups, flat.length(number))
            for flat in worker.flats
            for number in range(len(flat.segments))
        ],
        {
            number: [
                [(flat.groups, flat.length(segment)) for flat, segment in needs] for needs in units
            ]
            for number, units in unit_segments(worker.stages).items()
        },
    )


def predict_stages(config) -> list[Prediction]:
    """Return the prediction of one rank of each pipeline place: the first of its groups.

    Replicas and tensor-parallel ranks do the same work.
    """
    places = (Grid.of(config.grid, one) for one in range(config.grid.num_ranks))
    return [
        predict(config, one.world_rank)
        for one in places
        if not any(map(one.place, ("dp", "cp", "tp")))
    ]


def fullest(config) -> Prediction:
    """Return the prediction for the rank that needs most memory."""
    return max(predict_stages(config), key=lambda one: one.peak_total)
