"""`--schedule auto`: get this model's costs, simulate every schedule, and take the shortest.

The costs come from a measurement here, or from a cost model of the machine.
"""

from __future__ import annotations

from dataclasses import replace

from mpipar.comm.facts import broadcast_text
from mpipar.comm.grid import Grid
from mpipar.commands.resolve import AUTO
from mpipar.console.tables import nbytes, table
from mpipar.errors import UsageError
from mpipar.pipeline.choose import choose_schedule
from mpipar.pipeline.schedules.catalog import FAMILIES
from mpipar.plan import machine_file
from mpipar.plan.measure import measure_costs, unit_counts
from mpipar.plan.sharing import EQUAL_SHARES
from mpipar.plan.step import schedule_costs


def with_schedule(session, inputs, machine_path: str | None = None):
    """The Inputs with the chosen schedule's name instead of auto, and with the table of choices.

    World rank 0 chooses, by the cost model in machine_path if there is one. Every rank raises
    UsageError if no schedule fits --memory-limit or the cost model lacks this model. Every rank
    raises DataError if the cost model cannot be read.
    Comm: `measure_costs` without a cost model, and the name from world rank 0.
    """
    config, world = inputs.config, session.world
    if config.grid.schedule != AUTO:
        return inputs
    costs = None
    if machine_path is None:
        costs = measure_costs(config, Grid.of(config.grid, world.rank), inputs.ops, world)

    def chosen():
        if world.rank > 0:
            return "", []
        return shortest(config, costs or schedule_costs(machine_file.load(machine_path), config))

    name, notes = session.agree(chosen)
    config = with_schedule_name(config, broadcast_text(world, name))
    return replace(inputs, config=config, notes=[*inputs.notes, *notes])


def shortest(config, costs) -> tuple[str, list[str]]:
    """(name of the schedule, lines that say why). costs: of each unit.

    Raises UsageError if no schedule fits --memory-limit.
    """
    name, candidates = choose_schedule(
        config.grid.pp, config.grid.num_microbatches,
        lambda schedule: costs.merged(unit_counts(config, schedule)),
        config.run.memory_limit or float("inf"), config.grid.chunks)
    notes = [f"--schedule auto: {name} has the shortest simulated step", ranking(candidates)]
    if costs.cores is not None:
        notes.append(f"more ranks than cores: {EQUAL_SHARES}")
    return name, notes


def with_schedule_name(config, schedule: str):
    """The config with a schedule's name, and with --chunks only where that is free."""
    looped = FAMILIES[schedule].placement == "looped"
    return replace(config, grid=replace(config.grid, schedule=schedule,
                                        chunks=config.grid.chunks if looped else None))


def machine_problems(machine_path: str | None):
    """The check that a cost model has a schedule to choose, that is, --schedule auto."""
    def problems(config) -> list[str]:
        if machine_path is None or config.grid.schedule == AUTO:
            return []
        return [(f"--machine {machine_path}: --schedule auto chooses by it, but the schedule is "
                f"{config.grid.schedule}; take --schedule auto, or leave --machine out")]
    return problems, UsageError


def ranking(candidates) -> str:
    """The table of considered schedules, best first."""
    rows = [("schedule", "simulated step", "weights and stash", "")]
    for each in candidates:
        known = each.makespan is not None
        rows.append((each.name, f"{each.makespan * 1e3:.1f} ms" if known else "",
                     nbytes(each.peak_bytes) if known else "", each.verdict))
    return table(rows)
