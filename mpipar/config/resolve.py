"""Completes a Config for a number of ranks, and reports all its problems at once."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace

from mpipar.config.combinations import RULES, Rule, broken_of, values_of
from mpipar.config.grid import GridConfig, matching
from mpipar.config.model import ModelConfig
from mpipar.config.presets import PRESETS
from mpipar.config.sections import Config, settings
from mpipar.config.setting import field_problem
from mpipar.config.text import counted
from mpipar.errors import UsageError, UserError, combine

WHOLE_TOKENS = 1 << 14  # tokens of a step that a single rank computes in one microbatch
Check = tuple[Callable[[Config], list[str] | None], type[UserError]]


def _value_problems(config: Config) -> dict[str, str]:
    """Return {field name: what is wrong with its value}, each field on its own."""
    found = {field.name: field_problem(field, value) for _, field, value in settings(config)}
    return {name: problem for name, problem in found.items() if problem}


def config_problems(config: Config) -> list[str]:
    """Return everything wrong with the values themselves, whatever the number of ranks."""
    rules = [rule.problem(values) for rule, values in broken_rules(config, None)]
    return [*_value_problems(config).values(), *rules]


def _choose_batch(config: Config) -> tuple[Config, list[str]]:
    """Return the config with a batch size that replicas and microbatches divide, and notes."""
    preset, dp, num_mb = PRESETS[config.run.preset], config.grid.dp, config.grid.num_microbatches
    usual = preset["batch_size"]
    rows = config.train.batch_size or -(-usual // (dp * num_mb)) * dp * num_mb
    notes = [
        (
            f"batch size {usual} of preset {config.run.preset} rounded up to {rows}, a multiple of"
            f" dp {dp} * {counted(num_mb, 'microbatch')}"
        )
    ] * (config.train.batch_size is None and rows != usual)
    return replace(config, train=replace(config.train, batch_size=rows)), notes


# If one of these is wrong, nothing is chosen, and the checks of other packages do not run: they
# could not compute with the value.
FIRST = {
    "batch_size",
    "preset",
    "dtype",
    "device",
    *(field.name for part in (ModelConfig, GridConfig) for field in dataclasses.fields(part)),
} - {"schedule"}  # nothing is computed with the name of one that does not exist


def _choose(config: Config, world_size: int) -> tuple[Config, set[str]]:
    """Return the config with layout, microbatches and model filled in, and the guessed axes.

    If no layout fits, axes that were not given are 1; those returned are then not judged. A guessed
    tp is judged, because what fails with 1 fails with any.
    """
    model, given, preset = config.model.completed(), config.grid, PRESETS[config.run.preset]
    axes = (given.dp, given.pp, given.tp)
    fitting = matching(axes, world_size, model.layers, model.heads, model.whole_kv_heads, given.cp)
    dp, pp, tp = fitting[0] if fitting else [axis or 1 for axis in axes]
    method = given.cp_attention or ("ring" if given.cp > 1 else None)
    grid = replace(given, dp=dp, pp=pp, tp=tp, cp_attention=method)
    # Microbatches serve pipelines and memory; each costs interpreter time.
    tokens = (config.train.batch_size or preset["batch_size"]) * model.seq_len
    few = grid.num_ranks == 1 and tokens <= WHOLE_TOKENS
    num_mb = given.num_microbatches or (1 if few else preset["num_microbatches"])
    guessed = set() if fitting else {axis for axis in ("dp", "pp") if getattr(given, axis) is None}
    return replace(config, model=model, grid=replace(grid, num_microbatches=num_mb)), guessed


def broken_rules(
    config: Config,
    world_size: int | None,
    rules: Iterable[Rule] = RULES,
    bad: Iterable[str] = (),
    **facts,
) -> list[tuple[Rule, SimpleNamespace]]:
    """Return the rules that a Config breaks on so many ranks, each with the values it judged.

    If their number is unknown, only what was typed is judged. config, bad: as in `resolve`. facts:
    further values that rules judge by, see `values_of`.
    """
    bad = {*_value_problems(config), *bad}
    free = frozenset(axis for axis in ("dp", "pp", "tp") if getattr(config.grid, axis) is None)
    facts |= {"ranks": world_size, "free": free}
    is_open = world_size is None or bool(bad & FIRST)
    stages = [(False, values_of(config, **facts), bad | ({"ranks"} if is_open else set()))]
    if not is_open:
        chosen, guessed = _choose(config, world_size)
        stages.append((True, values_of(chosen, **facts), bad | guessed))
    return [
        (rule, values)
        for complete, values, unknown in stages
        for rule in broken_of((one for one in rules if one.complete == complete), values, unknown)
    ]


def resolve(
    config: Config,
    world_size: int,
    checks: Iterable[Check] = (),
    *,
    errors: Iterable[UserError] = (),
    bad: Iterable[str] = (),
    rules: Iterable[Rule] = RULES,
    **facts,
) -> tuple[Config, list[str]]:
    """Fill in every None; return the config and notes; raise one UserError with all problems.

    checks: functions of other packages that list a config's problems, each with its class of error.
    They get the completed config, and may raise a UserError of their own. errors: those found so
    far. bad: fields whose text could not even be read; they hold defaults, from which nothing is
    concluded. rules: those to be kept; facts: further values they judge by, see `values_of`.
    """
    found, notes = _value_problems(config), []
    bad = {*found, *bad}
    rules_broken = broken_rules(config, world_size, rules, bad, **facts)
    usage = [*found.values(), *(rule.problem(values) for rule, values in rules_broken)]
    errors = [*errors, *([UsageError(usage)] if usage else [])]
    if not bad & FIRST:
        config, notes = _choose_batch(_choose(config, world_size)[0])
        for check, error in checks:
            try:
                if texts := check(config):
                    raise error(texts)
            except UserError as raised:
                errors.append(raised)
    if errors:
        raise combine(errors)
    return config, notes
