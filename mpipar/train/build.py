"""Builds a Worker's parts from a Config: schedule, groups, stages, gradient sums, weights."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.comm.grid import ISLAND, Grid
from mpipar.comm.groups import Comms
from mpipar.comm.recorder import Recorder
from mpipar.comm.transport import Options
from mpipar.config.grid import GridConfig
from mpipar.config.model import ModelConfig
from mpipar.config.sections import Config
from mpipar.config.train import OPTIMIZERS, MemoryConfig
from mpipar.layers.context import Context, layer_options
from mpipar.layers.flat import FlatParams
from mpipar.layers.param import Copies, Param
from mpipar.models.decoder import Stage
from mpipar.ops.functions import Ops
from mpipar.pipeline.csv_format import read_csv
from mpipar.pipeline.engine import WholeWeights
from mpipar.pipeline.instructions import Instr, Schedule
from mpipar.pipeline.lowering import lower, with_weights_kept
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.train.gradsync import GradSync
from mpipar.train.muon import Muon
from mpipar.train.optim import AdamW, Sgd, Signs
from mpipar.train.zero import (
    FullyShardedUnits,
    ReduceScatterGradSync,
    ReshardAfterStep,
    ShardedFlatParams,
    ShardedGradSync,
)

if TYPE_CHECKING:
    from mpipar.comm.groups import World


# The update rules of flat buffers, by name.
UPDATES: dict[str, type[Sgd]] = {"sgd": Sgd, "adamw": AdamW, "muon": Muon, "signs": Signs}


def configured_schedule(grid_config: GridConfig) -> Schedule:
    """Return the schedule of a resolved GridConfig: made by name, or read from --schedule-csv.

    Raises UsageError for counts that the schedule cannot take, and for a file that cannot be read
    or run.
    """
    if grid_config.schedule_csv is not None:
        return read_csv(Path(grid_config.schedule_csv))
    assert grid_config.pp, grid_config
    assert grid_config.num_microbatches, grid_config
    return make_schedule(
        grid_config.schedule,
        grid_config.pp,
        grid_config.num_microbatches,
        grid_config.chunks,
    )


def lowered(config: Config, schedule: Schedule, pp_rank: int) -> list[Instr]:
    """Return a pipeline rank's program of a schedule, in the form that the engine runs."""
    program = lower(schedule, pp_rank)
    return with_weights_kept(program) if config.memory.keeps_gathered else program


def with_shared_heads(grid: Grid, model: ModelConfig) -> Grid:
    """Return the grid with runs of neighbours in tp that hold the same key and value heads.

    There are such runs where tp has more ranks than there are key and value heads.
    """
    shared = grid.size("tp") // (model.kv_heads or grid.size("tp"))
    return replace(grid, sizes={**grid.sizes, "kv": max(1, shared)})


def groups_of(
    config: Config,
    grid: Grid,
    schedule: Schedule,
    ops: Ops,
    recorder: Recorder,
    mpi_world: World | None,
) -> Comms:
    """Return all groups of a rank.

    Tied tables have copies on the pipeline ranks of both ends; their gradients are summed over that
    group ("tie"). Muon gathers its matrices over all ranks of a stage.
    Comm: one split over the world for each group; every rank must make its own.
    """
    ends = {schedule.stage_to_rank[0], schedule.stage_to_rank[-1]}
    partitions = {"tie": grid.partition("pp", [tuple(sorted(ends))])}
    if config.train.optimizer == "muon":  # all ranks that hold the same stages
        partitions["muon"] = [
            replace(grid, world_rank=grid.rank_at(**place)).group("data", "tp")
            for place in grid.group_ranks([ISLAND, "pp"])
        ]
    run = config.run
    sync = os.environ.get("MPIPAR_SYNC_SENDS") == "1"
    options = Options(sync, run.check_comm, all_reduce=run.all_reduce)
    rings = {"tp": vars(config.model).get("tp_matmul"), "cp": config.grid.cp_attention}
    messages = {"pp", *(axis for axis, method in rings.items() if method == "ring")}
    return Comms(grid, ops, recorder, mpi_world, options, partitions, messages)


def stages_of(
    config: Config, schedule: Schedule, stage_layers: tuple[int, ...], ops: Ops, comms: Comms
) -> dict[int, Stage]:
    """Return {stage: the model's Stage} of a pipeline rank, with parameters in flat buffers.

    Each tensor has one owner: the rank of its first stage.
    """
    memory, pp_rank = config.memory, comms.grid.group_rank("pp")
    bucket = config.train.bucket_bytes // ops.accum_dtype.itemsize
    sharded = partial(ShardedFlatParams, level=memory.zero, bucket=bucket)
    make_flat = sharded if memory.zero else FlatParams
    rules = OPTIMIZERS[config.train.optimizer]
    tied = Copies(("tie",) if schedule.num_stages > 1 else (), schedule.stage_to_rank[0] == pp_rank)
    context = Context(
        ops, comms, **layer_options(config), make_flat=make_flat, rules=rules, tied=tied
    )
    tables: dict[str, Param] = {}
    return {
        stage: Stage(context, config.model, stage, stage_layers, tables)
        for stage in schedule.stages_by_rank[pp_rank]
    }


def gradient_sums(memory: MemoryConfig) -> type[GradSync[FlatParams]] | type[ReduceScatterGradSync]:
    """Return the class that sums gradients, as --zero says."""
    return {0: GradSync, 1: ReduceScatterGradSync, 3: ShardedGradSync}[memory.zero]


def gathered_weights(memory: MemoryConfig, ops: Ops, stages: dict[int, Stage]) -> WholeWeights:
    """Return what makes weights whole before a pass reads them, as the memory settings say."""
    kind = ReshardAfterStep if memory.keeps_gathered else FullyShardedUnits
    return kind(ops, stages) if memory.zero == 3 else WholeWeights()
