"""What one rank of any layout would do, without MPI and numbers: the code is the cost model.

The real Worker takes one step on shapes. So memory, FLOPs, and every barrier with its bytes come
from the same lines that will run. A prediction can be wrong only about what shapes do not
determine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpipar import data
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

    peak_bytes: {label: bytes} at the instant of the largest sum. flops: {phase: FLOPs of products}.
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


def routed(config, grid) -> tuple[np.ndarray, int] | None:
    """Return what `ShapeOps.routed` is in a layout: see there."""
    table = rows.routed_rows(config, grid)
    return None if table is None else (table, grid.place("expert"))


def predict(config, world_rank: int, worst_case: bool = False) -> Prediction:
    """Run one step of `world_rank` in the layout of a resolved config, on shapes.

    Experts are equally popular, or as popular as --routing says. In the worst case all rows of the
    group pass those of this rank.
    """
    recorder = Recorder(capacity=1 << 20)
    ops = ops_module.shapes_for(config.run, recorder)
    grid = Grid.of(config.grid, world_rank)
    exact = getattr(ops, "exact", ops)
    exact.worst_case, exact.routed = worst_case, routed(config, grid)
    worker = Worker(config, grid, ops, recorder)
    if config.run.save_async and config.run.device == "cpu":  # a GPU's copy lies on its host
        elements = num_elements(own_pieces(worker))
        snapshot = ops.empty((elements,), ops.statistics, label="snapshot")  # noqa: F841 (held)
    blank_batch = data.data_of(config.model).blank_batch
    worker.train_step(1, lambda mb: blank_batch(ops, config))
    return Prediction(world_rank, ops.peak, dict(ops.flops), recorder,
                      {axis: comm.ranks for axis, comm in worker.comms.groups.items()},
                      sum(flat.size for flat in worker.flats),
                      [(flat.groups, flat.length(number)) for flat in worker.flats
                       for number in range(len(flat.segments))],
                      {number: [[(flat.groups, flat.length(segment)) for flat, segment in needs]
                                for needs in units]
                       for number, units in unit_segments(worker.stages).items()})
