"""The full table of illegal combinations of settings, with the rows that depend on schedules.

The other rows, which need no schedule, are in `config.combinations`, below this folder. This is the
lowest folder that knows both, so the two parts are joined here. docs/reference/combinations.md
shows the table.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mpipar.config import combinations
from mpipar.config.grid import GridConfig
from mpipar.config.rule import Rule
from mpipar.config.setting import flag
from mpipar.pipeline.placements import PLACEMENTS
from mpipar.pipeline.schedules.families import FAMILIES, num_stages

MOST_PASSES = 1 << 18  # forward passes of a step, which take some seconds to prove


def family(v: SimpleNamespace) -> Any:
    """Return the Family of the schedule; None for a CSV file and unknown names."""
    return None if v.schedule_csv else FAMILIES.get(v.schedule)


def stages(v: SimpleNamespace) -> int:
    """Return the number of stages into which the schedule of these values splits the model."""
    return v.csv.num_stages if v.csv else num_stages(v.schedule, v.pp, v.chunks)


def streams(v: SimpleNamespace) -> int:
    """Return the number of streams of microbatches in the schedule: one per copy of the model."""
    return len(PLACEMENTS[family(v).placement].copies)


def least_microbatches(v: SimpleNamespace) -> int:
    """Return the next number of microbatches that fills all streams equally."""
    least: int = max(family(v).rounds * v.pp, v.num_microbatches)
    return -(-least // streams(v)) * streams(v)


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


OF_SCHEDULES = (
    Rule(
        "passes of a step",
        ("num_microbatches", "pp", "schedule", "chunks"),
        lambda v: family(v) and stages(v) * v.num_microbatches > MOST_PASSES,
        f"a schedule has at most {MOST_PASSES:,} forward passes, which take seconds to prove; use a"
        " smaller --num-microbatches",
        complete=True,
    ),
    Rule(
        "chunks of a schedule",
        ("chunks", "schedule"),
        lambda v: (
            family(v) and not family(v).looped and v.chunks not in (None, family(v).stages_per_rank)
        ),
        "only looped schedules take any number of stages on a rank; leave --chunks out, or use"
        " --schedule interleaved",
    ),
    Rule(
        "pairs of dualpipe",
        ("pp", "schedule"),
        lambda v: family(v) and v.pp % streams(v) > 0,
        "dualpipe pairs the pipeline ranks up, so their number is even; use an even --pp, or"
        " --schedule dualpipe-v",
        complete=True,
    ),
    Rule(
        "streams of dualpipe",
        ("num_microbatches", "pp", "schedule"),
        lambda v: family(v) and v.num_microbatches != least_microbatches(v),
        "two full streams need at least 2 pp microbatches, and in dualpipe an even number; use an"
        " even --num-microbatches from 2 * {pp} on",
        complete=True,
    ),
    Rule(
        "number of stages",
        ("stage_layers", "schedule_csv", "schedule", "pp", "chunks"),
        lambda v: (
            v.stage_layers is not None and (v.csv or family(v)) and len(v.stage_layers) != stages(v)
        ),
        "it must give the number of blocks for each stage of the schedule; use as many numbers as"
        " there are stages, or leave --stage-layers out",
        complete=True,
    ),
    order_of_a_file("schedule"),
    order_of_a_file("chunks"),
    number_of_a_file("pp", "pp_size"),
    number_of_a_file("num_microbatches", "num_microbatches"),
)

RULES = (*combinations.RULES, *OF_SCHEDULES)
