"""The full table of illegal combinations of settings: `config.combinations`, and the schedules'."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from mpipar.config import combinations
from mpipar.config.combinations import Rule
from mpipar.config.grid import GridConfig
from mpipar.config.setting import flag
from mpipar.pipeline.schedules.catalog import FAMILIES, LIMITS, Limit, num_stages


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
