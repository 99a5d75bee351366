"""Settings of a resumed run: those it had, overridden by what the user names again.

On a different number of ranks it needs a layout that its settings allow; batch size and shape are
those of the run, and not every layout takes them. Some settings only say how the work is done. They
keep their values if some layout takes these, and give way otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import islice, product

from mpipar.comm.grid import AXES, LAYOUT
from mpipar.commands.resolve import resolve
from mpipar.config.grid import AUTO, GridConfig
from mpipar.config.layout import divisors, matching
from mpipar.config.model import CUTS, ModelConfig
from mpipar.config.reading import ParsedConfig, over
from mpipar.config.resolve import config_problems
from mpipar.config.rule import typed
from mpipar.config.sections import Config
from mpipar.config.setting import flag
from mpipar.errors import UsageError, UserError
from mpipar.files.text import counted

FAR = 8  # how many other numbers of ranks are tried, below and above
GIVES_WAY = ("schedule", "num_microbatches", "zero")  # the last one first
# What determines the numbers of a run: with another value it would be another run.
FIXED = (
    "preset",
    "dtype",
    "seed",
    "loss_scale",
    "loss_scale_interval",
    "batch_size",
    "optimizer",
    "lr",
    "lr_schedule",
    "min_lr_ratio",
    "decay_ratio",
    "warmup_steps",
    "weight_decay",
    "beta1",
    "beta2",
    "eps",
    "clip",
)
# What belongs to one start of the program, not to the run.
OF_A_START = ("resume", "out", "run_name", "trace", "trace_ops", "progress")
# What is chosen together: naming one of them resets the others.
ORDER = ("schedule", "schedule_csv", "chunks", "group_size", "stage_layers")


def legal(parsed: ParsedConfig, saved: Mapping[str, object], world_size: int) -> ParsedConfig:
    """Return the configuration of a run resumed on this many ranks, with a legal layout.

    saved: see `resumed`. What the user named stays. Raises UsageError if only other numbers of
    ranks have a layout; any other mistake is reported by resolve().
    """
    first = resumed(parsed, saved, world_size)
    if first.problems or config_problems(first.config) or _fits(first, world_size):
        return first
    found = next(_legal(parsed, saved, world_size), None)
    if found is not None or parsed.given.keys() & {*AXES, *GIVES_WAY}:
        return found or first
    fewer, more = (
        (number for number in numbers if any(_legal(parsed, saved, number)))
        for numbers in (
            range(world_size - 1, max(0, world_size - 1 - FAR), -1),
            range(world_size + 1, world_size + 1 + FAR),
        )
    )
    if near := [*islice(fewer, 1), *islice(more, 1)]:
        raise UsageError(
            f"{counted(world_size, 'rank')}: no layout of that many takes the run's batch size of"
            f" {saved['batch_size']} and its shape; resume it on"
            f" {' or '.join(map(str, near))}"
        )
    return first


def _legal(
    parsed: ParsedConfig, saved: Mapping[str, object], world_size: int
) -> Iterator[ParsedConfig]:
    """Yield the legal configurations on so many ranks, those with the fewest changes first."""
    for values in _ways(saved, parsed.given):
        for one in layouts(resumed(parsed, {**saved, **values}, world_size), world_size):
            if _fits(one, world_size):
                yield one


def _fits(parsed: ParsedConfig, world_size: int) -> bool:
    try:
        resolve(parsed, world_size)
    except UserError:
        return False
    return True


def _ways(saved: Mapping[str, object], given: Mapping[str, object]) -> list[dict[str, object]]:
    """Return values of the settings that give way, those with the fewest changes first."""
    rows, num_mb = saved.get("batch_size", 1), saved.get("num_microbatches", 1)
    others = {
        "schedule": [GridConfig.schedule],
        "zero": [0],
        "num_microbatches": sorted(
            divisors(rows), key=lambda number: (abs(number - num_mb), number)
        ),
    }
    names = [name for name in GIVES_WAY if name in saved and name not in given]
    choices = [
        [saved[name], *(one for one in others[name] if one != saved[name])] for name in names
    ]
    ways = [dict(zip(names, values, strict=True)) for values in product(*choices)]
    return sorted(ways, key=lambda way: sum(way[name] != saved[name] for name in names))


def layouts(parsed: ParsedConfig, world_size: int) -> Iterator[ParsedConfig]:
    """Yield a configuration for every layout of these ranks with the given axes, best first."""
    grid = parsed.config.grid
    for dp, pp, tp in matching((grid.dp, grid.pp, grid.tp), world_size, world_size, 0, cp=grid.cp):
        yield replace(
            parsed, config=replace(parsed.config, grid=replace(grid, dp=dp, pp=pp, tp=tp))
        )


def changes(config: Config, saved: Mapping[str, object]) -> list[str]:
    """Return a line about what has given way, if anything has."""
    found = {"zero": config.memory.zero, "num_microbatches": config.grid.num_microbatches}
    words = [
        f"{flag(name)} {value} ({saved[name]} before)"
        for name, value in found.items()
        if saved.get(name, value) != value
    ]
    return [f"with this layout: {', '.join(words)}"] if words else []


def resumed(parsed: ParsedConfig, saved: Mapping[str, object], world_size: int) -> ParsedConfig:
    """Return the configuration of a run resumed on this many ranks.

    saved: the values of the run's config.toml. If the user names a layout, or the saved one does
    not fit the number of ranks, it is chosen again, along with the stages and groups that depend on
    it. What `auto` chose stays.
    """
    given = {
        name: value for name, value in parsed.given.items() if (name, value) != ("schedule", AUTO)
    }
    problems = [*parsed.unread, *unchangeable(given, saved)]
    fits = world_size == math.prod(saved.get(axis, 1) for axis in AXES)
    named = any(axis in given for axis in LAYOUT)
    parsed = replace(
        parsed,
        given=given,
        unread=tuple(problems),
        chooses_layout=parsed.chooses_layout and (named or not fits),
    )
    dropped = set(OF_A_START)
    if any(name in given for name in ORDER):
        dropped |= set(ORDER)
    if named or not fits:
        dropped |= {*LAYOUT, *ORDER, "cp_attention"} - {"schedule"}
    return over({name: value for name, value in saved.items() if name not in dropped}, parsed)


def unchangeable(given: Mapping[str, object], saved: Mapping[str, object]) -> list[str]:
    """Return a problem for each value that the user names differently from the saved run."""
    shape = [one.name for one in fields(ModelConfig) if one.name not in CUTS]
    return [
        f"{flag(name)} {typed(given[name])}: can't change in a resumed run, which has"
        f" {typed(saved[name]) if name in saved else 'the default'}; leave {flag(name)} out, or"
        " start a new run"
        for name in dict.fromkeys([*shape, *FIXED])
        if name in given and given[name] != saved.get(name)
    ]
