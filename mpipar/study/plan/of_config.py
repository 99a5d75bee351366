"""A layout as the configuration of a run, the step of a configuration on a machine, --layout auto.

`--layout auto` takes the layout with the shortest step, as a machine's data sheet predicts it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from mpipar import models
from mpipar.comm.grid import AXES
from mpipar.config.grid import matching, sizes_text
from mpipar.config.sections import Config
from mpipar.errors import UsageError, UserError
from mpipar.pipeline.schedules.catalog import FAMILIES
from mpipar.run.console.tables import nbytes
from mpipar.run.data.rows import rows_per_microbatch
from mpipar.run.files.settings import ParsedConfig
from mpipar.run.resolve import resolve
from mpipar.study.explain.predict import fullest
from mpipar.study.plan.job import STACKS, Layout, Shape, segments
from mpipar.study.plan.machine import Machine, load_machine
from mpipar.study.plan.model import Step, block_of, step_time
from mpipar.study.schedules.simulate import Costs, simulate
from mpipar.train.build import configured_schedule

SHEETS = {"cpu": "cpu", "cuda": "h100"}  # device -> data sheet of --layout auto, without --machine


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
        schedule.name if schedule.name in FAMILIES else "1f1b",
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


# --- --layout auto


def legal_layouts(parsed: ParsedConfig, world_size: int) -> list[tuple[ParsedConfig, Config]]:
    """Return the configurations of every layout of these ranks, and what they resolve to.

    Axes that the user names stay, and so does cp. Only layouts with the smallest number of rows per
    step are considered, since a preset's number is rounded up to what a layout takes.
    """
    grid, found = parsed.config.grid, []
    for dp, pp, tp in matching((grid.dp, grid.pp, grid.tp), world_size, world_size, 0, 0, grid.cp):
        sizes = replace(grid, dp=dp, pp=pp, tp=tp)
        one = replace(parsed, config=replace(parsed.config, grid=sizes))
        with suppress(UserError):
            found.append((one, resolve(one, world_size)[0]))
    least = min((config.train.batch_size for _, config in found), default=0)
    return [pair for pair in found if pair[1].train.batch_size == least]


def best_of(configs: list[Config], machine_name: str | None) -> tuple[int, str]:
    """Return (index of the config with the shortest predicted step, a note on the choice).

    configs: resolved, the same job in several layouts. Raises UserErrors: for a machine that can't
    be read or lacks this model, and if nothing fits --memory-limit.
    """
    run = configs[0].run
    name = machine_name or SHEETS[run.device]
    machine, steps, wrong = load_machine(name, configs[0].grid.num_ranks), {}, []
    for place, config in enumerate(configs):
        layout = sizes_text(vars(config.grid))
        peak = fullest(config).peak_total if run.memory_limit is not None else 0
        if run.memory_limit is None or peak <= run.memory_limit:
            steps[place] = step_of(config, machine).total, layout
        else:
            wrong.append(
                f"--layout auto: {layout}: its fullest rank needs {nbytes(peak)}, and"
                f" --memory-limit is {nbytes(run.memory_limit)}"
            )
    if not steps:
        raise UsageError(wrong)
    order = sorted(steps, key=steps.__getitem__)
    words = ", ".join(f"{steps[one][1]} {steps[one][0] * 1e3:.3g} ms" for one in order)
    return order[0], f"--layout auto: predicted steps by the data sheet {name}: {words}"


def with_best_layout(
    parsed: ParsedConfig, world_size: int, machine_name: str | None = None
) -> ParsedConfig:
    """Return the configuration with the best of several layouts, and a note, under --layout auto.

    Every rank finds the same one. If no layout can run, what is returned says why when it is
    resolved. Raises what `best_of` raises.
    """
    legal = legal_layouts(parsed, world_size) if parsed.chooses_layout else []
    if not legal:
        return parsed
    place, note = best_of([config for _, config in legal], machine_name)
    return replace(legal[place][0], notes=(*parsed.notes, note))
