"""From what the user typed to a complete Config; one error reports all mistakes at once."""

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from mpipar.config import combinations
from mpipar.config import resolve as config_resolve
from mpipar.config.combinations import Rule
from mpipar.config.grid import GridConfig
from mpipar.config.sections import Config, build, in_force, named
from mpipar.config.setting import flag
from mpipar.errors import DataError, UsageError, UserError
from mpipar.pipeline.csv_format import read_csv
from mpipar.pipeline.instructions import Schedule
from mpipar.pipeline.schedules.catalog import FAMILIES, LIMITS, Limit, num_stages
from mpipar.run.checkpoint import formats
from mpipar.run.data.prepared import is_dataset, read_dataset
from mpipar.run.files.settings import ParsedConfig, choice_problems
from mpipar.run.source import find_source

# How routers are trained, which weights do not fix; but a bias per expert is one of the weights.
ROUTING = ("router_balance", "router_loss_coef")


def resolve(
    parsed: ParsedConfig,
    world_size: int,
    checks: Iterable[config_resolve.Check] = (),
    machine: str | None = None,
) -> tuple[Config, list[str]]:
    """Return a command's complete Config for this number of ranks, and notes for the user.

    checks: the command's own, besides the table of illegal combinations and the shape of weights.
    machine: the file of costs by which `train` chooses. Raises one UserError with all problems.
    Every rank that calls it gets the same Config.
    """
    config, source_notes, problems = parsed.config, [], parsed.problems
    errors: list[UserError] = []
    facts = {"machine": machine, "chooses_layout": parsed.chooses_layout}
    try:
        facts["csv"] = schedule_of_file(config)
    except UsageError as error:
        errors.append(error)
    if config.run.init_from is not None:
        try:
            source = find_source(config.run.init_from, f"--init-from {config.run.init_from}")
            given = parsed.given if "seq_len" not in parsed.bad else {}
            shape = formats.model_settings(source, given.get("seq_len"))
            if "seq_len" in given:  # rows may be shorter than the table of positions
                longest = shape.get("max_positions", shape.pop("seq_len"))
                if shape["positions"] == "learned":  # rotations fit rows of any length
                    shape["max_positions"] = longest
                    shape["seq_len"] = min(given["seq_len"], longest)
            config = with_weights_shape(parsed, shape, source)
            problems = [*parsed.unread, *choice_problems(config, parsed.given)]
            source_notes = formats.start_notes(source)
        except UserError as error:
            errors.append(error)
    elif size := data_vocabulary(parsed):
        config = replace(config, model=replace(config.model, vocab_size=size))
        source_notes = [f"--vocab-size {size}, the vocabulary of the data"]
    if problems:
        errors.insert(0, UsageError(problems))
    config, notes = config_resolve.resolve(
        config, world_size, checks, errors=errors, bad=parsed.bad, rules=RULES, **facts
    )
    return config, [*parsed.notes, *notes, *source_notes]


def with_weights_shape(parsed: ParsedConfig, shape: dict, source: str) -> Config:
    """Return the Config with the shape of its first weights; UsageError if flags contradict it.

    What the weights fix counts as given, so that a flag may belong to it, as --router-balance to
    the experts of the weights.

    source: the folder of these weights, which the Config names from now on.
    """
    typed = in_force(parsed.config) | parsed.given
    given = typed.keys() & parsed.given.keys() - parsed.bad
    shape = {
        name: value
        for name, value in shape.items()
        if not (name in ROUTING and name in given and "bias" not in (value, typed[name]))
    }
    found = [
        f"{named(name)} {typed[name]}: contradicts --init-from {typed['init_from']}, where it "
        f"is {value}; leave {named(name)} out"
        for name, value in shape.items()
        if name in given and typed[name] not in (None, value)
    ]
    if found:
        raise UsageError(found)
    kept = {name: value for name, value in typed.items() if value is not None}
    return build(kept | shape | {"init_from": source})


def data_vocabulary(parsed: ParsedConfig) -> int | None:
    """Return the vocabulary size of prepared data, if it determines that of the model.

    It does if the user gives no --vocab-size and the model's would be smaller.
    """
    config = parsed.config
    prepared = next(filter(is_dataset, config.run.data), None)
    if prepared is None or "vocab_size" in parsed.given:
        return None
    with contextlib.suppress(DataError):  # reported where the data is read
        found = read_dataset(Path(prepared))[0].vocab_size
        return found if found > config.model.vocab_size else None
    return None


def schedule_of_file(config: Config) -> Schedule | None:
    """Return the schedule of --schedule-csv's file. Raises UsageError if it can't be read."""
    path = config.grid.schedule_csv
    if path is None:
        return None
    try:
        return read_csv(Path(path))
    except UsageError as error:
        raise UsageError([f"--schedule-csv {path}: {text}" for text in error.problems]) from None


# --- the full table of illegal combinations: that of settings alone, and the schedules'


def breaks(limit: Limit, v: SimpleNamespace) -> bool:
    """Return whether counts break a limit of their schedule; a file has none."""
    family = None if v.schedule_csv else FAMILIES.get(v.schedule)
    return family is not None and limit.broken(family, v.pp, v.num_microbatches, v.chunks)


def stages(v: SimpleNamespace) -> int | None:
    """Return the number of stages into which the schedule of these values splits the model."""
    if v.csv or v.schedule_csv or v.schedule not in FAMILIES:
        return v.csv.num_stages if v.csv else None
    return num_stages(v.schedule, v.pp, v.chunks)


def order_of_a_file(name: str) -> Rule:
    """Return the row of a setting that a schedule file already determines."""
    return Rule(
        f"{name} and a file",
        (name, "schedule_csv"),
        lambda v: v.schedule_csv is not None and getattr(v, name) != getattr(GridConfig, name),
        f"the file brings its own order of work; leave {flag(name)} out",
    )


def number_of_a_file(name: str, own: str) -> Rule:
    """Return the row of a number that a schedule file is made for. own: the number's name there."""
    return Rule(
        f"{name.replace('_', ' ')} of a file",
        (name, "schedule_csv"),
        lambda v: v.csv and getattr(v, name) != getattr(v.csv, own),
        f"the schedule of the file is made for {flag(name)} {{csv.{own}}}; use that",
        complete=True,
    )


RULES = (
    *combinations.RULES,
    *(
        Rule(
            limit.name,
            limit.settings,
            partial(breaks, limit),
            limit.sentence,
            complete="pp" in limit.settings,  # which may be chosen
        )
        for limit in LIMITS
    ),
    Rule(
        "number of stages",
        ("stage_layers", "schedule_csv", "schedule", "pp", "chunks"),
        lambda v: v.stage_layers is not None and stages(v) not in (None, len(v.stage_layers)),
        "it must give the number of blocks for each stage of the schedule; use as many numbers as"
        " there are stages, or leave --stage-layers out",
        complete=True,
    ),
    order_of_a_file("schedule"),
    order_of_a_file("chunks"),
    number_of_a_file("pp", "pp_size"),
    number_of_a_file("num_microbatches", "num_microbatches"),
)
