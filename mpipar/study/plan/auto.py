"""`--layout auto`: the layout with the shortest step, as a machine's data sheet predicts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from mpipar.config.layout import matching, sizes_text
from mpipar.config.sections import Config
from mpipar.errors import UsageError, UserError
from mpipar.run.console.tables import nbytes
from mpipar.run.files.settings import ParsedConfig
from mpipar.run.resolve import resolve
from mpipar.study.explain.predict import fullest
from mpipar.study.plan.machine import load_machine
from mpipar.study.plan.of_config import step_of

SHEETS = {"cpu": "cpu", "cuda": "h100"}  # device -> data sheet, without --machine


def layouts(parsed: ParsedConfig, world_size: int) -> Iterator[ParsedConfig]:
    """Yield the configuration for every layout of these ranks with the given axes, best first."""
    grid = parsed.config.grid
    for dp, pp, tp in matching((grid.dp, grid.pp, grid.tp), world_size, world_size, 0, cp=grid.cp):
        yield replace(
            parsed, config=replace(parsed.config, grid=replace(grid, dp=dp, pp=pp, tp=tp))
        )


def legal_layouts(parsed: ParsedConfig, world_size: int) -> list[tuple[ParsedConfig, Config]]:
    """Return the configurations of every layout of these ranks, and what they resolve to.

    Axes that the user names stay, and so does cp. Only layouts with the smallest number of rows per
    step are considered, since a preset's number is rounded up to what a layout takes.
    """
    found = []
    for one in layouts(parsed, world_size):
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
