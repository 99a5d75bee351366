"""`--schedule auto`: measure what this model costs here, simulate every schedule, take the
shortest.
"""

from __future__ import annotations

from dataclasses import replace

from mpipar.commands.resolve import AUTO
from mpipar.grid import Grid
from mpipar.pipeline.choose import choose
from mpipar.plan.measure import measure_costs, stage_costs
from mpipar.report.console import nbytes, table
from mpipar.report.gather import broadcast_text


def with_schedule(session, inputs):
    """The Inputs with the chosen schedule's name in place of auto, and the table behind it in the
    notes.

    World rank 0 chooses. Raises (on every rank) UsageError when no schedule fits --memory-limit.
    Comm: `measure_costs`, and the name from world rank 0.
    """
    config, world = inputs.config, session.world
    if config.grid.schedule != AUTO:
        return inputs
    costs = measure_costs(config, Grid.of(config.grid, world.rank), inputs.ops, world)
    cap = config.run.memory_limit or float("inf")

    def chosen():
        if costs is None:
            return "", ()
        return choose(config.grid.pp, config.grid.num_microbatches,
                      lambda stages: stage_costs(costs, config, stages), cap, config.grid.chunks)

    name, candidates = session.agree(chosen)
    name = broadcast_text(world, name)
    notes = [*inputs.notes, f"--schedule auto: {name} has the shortest simulated step",
             ranking(candidates)]
    config = replace(config, grid=replace(config.grid, schedule=name))
    return replace(inputs, config=config, notes=notes)


def ranking(candidates) -> str:
    """The schedules that were considered, best first."""
    rows = [("schedule", "simulated step", "weights and stash", "")]
    for each in candidates:
        known = each.makespan is not None
        rows.append((each.name, f"{each.makespan * 1e3:.1f} ms" if known else "",
                     nbytes(each.peak_bytes) if known else "", each.verdict))
    return table(rows)
