"""From a Config to a complete one for a number of ranks, with all its problems reported at once."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from mpipar.config import layout
from mpipar.config.grid import grid_problems
from mpipar.config.layout import divisors, listing
from mpipar.config.memory import memory_problems, sharing_problems
from mpipar.config.presets import PRESETS, preset_problems
from mpipar.config.run import run_problems
from mpipar.config.sections import SECTIONS, Config, settings
from mpipar.config.setting import value_problem
from mpipar.errors import UsageError, UserError, combine
from mpipar.files.text import counted

WHOLE_TOKENS = 1 << 14  # of a step that one rank computes in one microbatch
Check = tuple[Callable[[Config], list[str] | None], type[UserError]]


def _value_problems(config: Config) -> dict[str, str]:
    """Field name -> what is wrong with its value, each field on its own."""
    found = {}
    for _, field, value in settings(config):
        if value is None or isinstance(value, bool):
            continue
        for one in value if isinstance(value, tuple) else (value,):
            problem = value_problem(field.name, field.metadata, one)
            if problem:
                found[field.name] = problem
    return found


def _relation_problems(config: Config, bad: set[str]) -> list[str]:
    """What is wrong between fields; a relation with a field in `bad` is not judged."""
    found = [] if bad & {"preset", "model"} else preset_problems(
        config.run.preset, config.model.model)
    return [*config.model.shape_problems(bad), *_stop_problems(config, bad),
            *grid_problems(config.grid, config.model.layers, bad), *found,
            *memory_problems(config), *run_problems(config.run)]


def _stop_problems(config: Config, bad: set[str]) -> list[str]:
    """An id that ends a text, but that the model can't say."""
    size = getattr(config.model, "vocab_size", math.inf)
    wrong = [] if bad & {"stop_token", "vocab_size"} else [
        one for one in config.run.stop_token if one >= size]
    return [f"--stop-token {wrong[0]}: the vocabulary ends with {size - 1}"] if wrong else []


def config_problems(config: Config) -> list[str]:
    """Everything wrong with the values themselves, whatever the number of ranks."""
    found = _value_problems(config)
    return [*found.values(), *_relation_problems(config, set(found))]


def _default_microbatches(config: Config) -> int:
    """The preset's number, or one where a single rank takes few tokens at once.

    Microbatches are for pipelines and for memory; each costs the interpreter's time.
    """
    preset, grid = PRESETS[config.run.preset], config.grid
    tokens = (config.train.batch_size or preset["batch_size"]) * config.model.targets_per_row
    alone = grid.dp * grid.pp * grid.cp * grid.tp == 1
    return 1 if alone and tokens <= WHOLE_TOKENS else preset["num_microbatches"]


def _choose_batch(config: Config) -> tuple[Config, list[str], list[str]]:
    """The config with batch size and microbatches filled in, problems, notes."""
    preset, dp, rows = PRESETS[config.run.preset], config.grid.dp, config.train.batch_size
    num_mb = config.grid.num_microbatches or _default_microbatches(config)
    unit, found, notes = dp * num_mb, [], []
    up = -(-(rows or preset["batch_size"]) // unit) * unit
    if rows is None and up != preset["batch_size"]:
        notes.append(f"batch size {preset['batch_size']} of preset {config.run.preset} rounded up "
                     f"to {up}, a multiple of dp {dp} * {counted(num_mb, 'microbatch')}")
    elif rows is not None and up != rows:
        down = f"{up - unit} or " if up > unit else ""
        cure = (f", or --num-microbatches {listing(divisors(rows // dp), num_mb)}"
                if rows % dp == 0 else ", or another --dp")
        found.append(f"--batch-size {rows}: must be a multiple of dp {dp} *"
                     f" {counted(num_mb, 'microbatch')} = {unit}; use --batch-size"
                     f" {down}{up}{cure}")
    return replace(config, grid=replace(config.grid, num_microbatches=num_mb),
                   train=replace(config.train, batch_size=up)), found, notes


# While one of these is wrong, the checks of other folders do not run: they could not compute with
# the value.
FIRST = {"batch_size", "preset", "dtype", "device", "loss_scale", "loss_scale_interval", *(
    field.name for part in SECTIONS["model"] + SECTIONS["grid"]
    for field in dataclasses.fields(part))}


def complete(config: Config, world_size: int, checks: Iterable[Check] = (),
             bad: Iterable[str] = ()) -> tuple[Config, list[str], list[UserError]]:
    """Fill in every None; return the config, notes for the user, and all problems as errors.

    checks: problems(config) of other folders, each with the error it stands for. They get the
    completed config, and may raise a UserError of their own.
    bad: names fields whose text could not even be read. They hold defaults, so nothing is concluded
    from them.
    """
    found = _value_problems(config)
    bad = set(found) | set(bad)
    usage, notes, errors = [*found.values(), *_relation_problems(config, bad)], [], []
    if not bad & FIRST:
        model = config.model.completed()
        given = config.grid
        (dp, pp, tp), misfits = layout.choose(
            (given.dp, given.pp, given.tp), world_size, model.layers, model.whole_heads,
            model.width, config.run.init_from is not None, cp=given.cp,
            kv_heads=model.whole_kv_heads)
        method = given.cp_attention or ("ring" if given.cp > 1 else None)
        config = replace(config, model=model, grid=replace(
            given, dp=dp, pp=pp, tp=tp, cp_attention=method))
        if not misfits and "zero" not in bad:
            misfits += sharing_problems(config)
        misfits += layout.context_problems(config.model, config.grid)
        config, batch_problems, notes = _choose_batch(config)
        usage += misfits + (batch_problems if given.dp or not misfits else [])
        for check, error in checks:
            try:
                texts = check(config)
            except UserError as raised:
                errors.append(raised)
            else:
                errors += [error(texts)] if texts else []
    if usage:
        errors.insert(0, UsageError(usage))
    return config, notes, errors


def resolve(config: Config, world_size: int,
            checks: Iterable[Check] = ()) -> tuple[Config, list[str]]:
    """The complete Config for this number of ranks, and notes. One error reports all problems."""
    config, notes, errors = complete(config, world_size, checks)
    if errors:
        raise combine(errors)
    return config, notes
