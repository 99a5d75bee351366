"""A layout as the configuration of a run, and the step of a configuration on a machine."""

from __future__ import annotations

from dataclasses import replace

from mpipar import models
from mpipar.comm.grid import AXES
from mpipar.config.sections import Config
from mpipar.errors import UsageError
from mpipar.run.data.rows import rows_per_microbatch
from mpipar.study.plan.job import BY_NAME, STACKS, Layout, Shape, segments
from mpipar.study.plan.machine import Machine
from mpipar.study.plan.model import Step, block_of, step_time
from mpipar.study.schedules.simulate import Costs, simulate
from mpipar.train.build import configured_schedule


def config_of(named: Config, shape: Shape, layout: Layout, dtype: str, device: str) -> Config:
    """Return the Config of a layout, before it is resolved. named: it names the model."""
    grid = replace(
        named.grid,
        **{axis: getattr(layout, axis) for axis in (*AXES, "ep", "num_microbatches", "schedule")},
        chunks=layout.chunks if layout.family.looped else None,
        stage_layers=layout.blocks_of(shape.layers) if layout.pp > 1 else None,
        rank_order="dp,pp,cp,tp" if layout.outer == "dp" else "pp,dp,cp,tp",
    )
    return replace(
        named,
        grid=grid,
        model=replace(
            named.model, seq_len=shape.tokens, sequence_parallel=layout.sequence_parallel
        ),
        train=replace(named.train, batch_size=layout.dp * layout.rows * layout.num_microbatches),
        memory=replace(named.memory, recompute=layout.recompute, zero=layout.zero),
        run=replace(named.run, dtype=dtype, device=device),
    )


def step_of(config: Config, machine: Machine) -> Step:
    """Return the step of a resolved config, in the order of its own schedule.

    Raises UsageError for a number format that the machine has no rate for.
    """
    dtype, grid, memory = config.run.dtype, config.grid, config.memory
    if dtype not in machine.peak_tflops:
        raise UsageError(
            f"--dtype {dtype}: {machine.name} has no rate for it; use one of"
            f" {', '.join(machine.peak_tflops)}"
        )
    machine, stack = machine.with_dtype(dtype), STACKS["mpipar"].with_dtype(dtype)
    schedule, shape = configured_schedule(grid), Shape.of(config.model.completed())
    layout = Layout(
        grid.island_dp,
        grid.pp,
        grid.cp,
        grid.tp,
        rows_per_microbatch(config),
        grid.num_microbatches,
        schedule.name if schedule.name in BY_NAME else "1f1b",
        schedule.num_stages // grid.pp,
        config.model.sequence_parallel,
        memory.recompute,
        memory.zero,
        grid.rank_order.partition(",")[0],
        grid.ep,
    )
    block = block_of(shape, layout, machine, stack)
    head, counts = block.head.total / 3, models.layer_split(config, schedule)
    passes = (block.f.total, block.i.total + block.again.total, block.w.total)
    costs = Costs(
        *(
            tuple(
                count * one + head * (stage == len(counts) - 1)
                for stage, count in enumerate(counts)
            )
            for one in passes
        )
    )
    seconds = float(simulate(schedule, costs).makespan)
    step = step_time(shape, layout, machine, stack, block, seconds)
    if grid.islands is None:
        return step
    meeting = meeting_seconds(shape, layout, machine, grid.islands)
    return step._replace(sums=step.sums + meeting / config.train.outer_interval)


def meeting_seconds(shape: Shape, layout: Layout, machine: Machine, islands: int) -> float:
    """Return the seconds of the sum of float32 weights over islands. layout: of one of them."""
    return sum(machine.all_reduce(4 * one, islands, layout.ranks) for one in met(shape, layout))


def met(shape: Shape, layout: Layout) -> list[float]:
    """Return how many numbers of each segment a rank sums over islands: its piece with --zero."""
    blocks = max(layout.blocks_by_rank(shape.layers))
    held = segments(shape, layout, blocks, shape.table_parameters)
    return [one.elements / (one.ranks if layout.zero else 1) for one in held]
