"""`--layout auto` and `--schedule auto`: the candidate layouts, and the costs that decide.

The costs come from a measurement on these ranks, or from a cost model of the machine.
"""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

from mpipar.comm.facts import broadcast_text
from mpipar.comm.hosts import quiet_barrier
from mpipar.commands.elsewhere import layouts
from mpipar.commands.resolve import resolve
from mpipar.config.grid import AUTO
from mpipar.config.layout import sizes_text
from mpipar.config.reading import ParsedConfig
from mpipar.config.sections import Config
from mpipar.errors import UserError
from mpipar.plan.choose_layout import choose, with_schedule_name
from mpipar.plan.data_sheet import machine_of
from mpipar.plan.measure_machine import SECONDS, measure_machine


def legal_layouts(parsed: ParsedConfig, world_size: int) -> list[ParsedConfig]:
    """Return the configurations of every layout of these ranks; only one without --layout auto.

    Axes that the user names stay, and so does cp. Only layouts with the smallest number of rows per
    step are considered, since a preset's number is rounded up to what a layout takes. If none can
    run, the configuration without --layout auto says what is wrong.
    """
    if not parsed.chooses_layout:
        return [parsed]
    found = []
    for one in layouts(parsed, world_size):
        try:
            found.append((resolve(one, world_size)[0].train.batch_size, one))
        except UserError:
            continue
    least = min((rows for rows, _ in found), default=0)
    return [one for rows, one in found if rows == least] or [parsed]


def with_choices(session, inputs, choices: list[ParsedConfig], machine_path: str | None = None):
    """Return the Inputs with layout and schedule in place of auto, and tables of the candidates.

    choices: from `legal_layouts`; the inputs belong to the first. World rank 0 chooses, by the cost
    model in machine_path if there is one. Every rank raises UsageError if nothing fits
    --memory-limit or the cost model lacks this model, DataError if the file cannot be read.
    Comm: `measure_machine` without a cost model; a barrier; the choice from world rank 0.
    """
    config, world = inputs.config, session.world
    machine, notes = None, []
    if choices[0].chooses_layout and getattr(config.model, "experts", None):
        notes.append(
            f"layout auto keeps ep {config.grid.ep}, as it keeps cp; --ep N sets another"
            " number of expert-parallel ranks"
        )
    if choices[0].chooses_layout and len(choices) == 1:
        notes.append(
            f"--layout auto: {sizes_text(vars(config.grid))} is the only layout possible"
            f" on these ranks for this model and {config.train.batch_size} rows per step"
        )
    others = (resolve(one, world.size)[0] for one in choices[1:])
    configs = [config, *(replace(config, grid=one.grid, train=one.train) for one in others)]
    if machine_path is not None:
        machine = session.agree(
            lambda: machine_of(machine_path, configs) if world.rank == 0 else None
        )
        source = f"by the cost model {machine_path}"
    if config.grid.schedule != AUTO and len(choices) == 1:
        return replace(inputs, notes=[*inputs.notes, *notes])
    if machine_path is None:
        begin = monotonic()
        machine = measure_machine(configs, inputs.ops, world)
        source = (
            f"measured for {monotonic() - begin:.1f} s on these ranks, {SECONDS:g} at most;"
            " --machine FILE avoids the measurement"
        )

    def chosen():
        try:
            if world.rank == 0:
                return choose(configs, machine)
        finally:
            quiet_barrier(world)  # the others sleep
        return None, []

    best, why = session.agree(chosen)
    text = broadcast_text(world, f"{place_of(best, configs)} {best.grid.schedule}" if best else "")
    place, name = text.split()
    config = configs[int(place)]
    if config.grid.schedule == AUTO:
        config = with_schedule_name(config, name)
    tables = [line for text in why for line in text.splitlines()]
    return replace(inputs, config=config, notes=[*inputs.notes, source, *notes, *tables])


def place_of(best: Config, configs: list[Config]) -> int:
    """Return the index of the configuration that has this layout."""
    axes = [(one.grid.dp, one.grid.pp, one.grid.cp, one.grid.tp) for one in (*configs, best)]
    return axes.index(axes[-1])
