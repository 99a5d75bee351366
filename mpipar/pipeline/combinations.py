"""The full table of illegal combinations of settings, with the rows that depend on schedules.

The other rows, which need no schedule, are in `config.combinations`, below this folder. This is the
lowest folder that knows both, so the two parts are joined here. docs/reference/combinations.md
shows the table.
"""

from __future__ import annotations

from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

from mpipar.config import combinations
from mpipar.config.combinations import could_be
from mpipar.config.grid import GridConfig
from mpipar.config.rule import Rule
from mpipar.pipeline.placements import PLACEMENTS
from mpipar.pipeline.schedules.families import FAMILIES, SCHEDULES, num_stages

MOST_PASSES = 1 << 18  # forward passes of a step, which take some seconds to prove


def family(v: SimpleNamespace) -> Any:
    """Return the Family of the schedule; None for a CSV file and unknown names."""
    return None if v.schedule_csv else FAMILIES.get(v.schedule)


def stages(v: SimpleNamespace) -> int:
    """Return the number of stages into which the schedule of these values splits the model."""
    return v.csv.num_stages if v.csv else num_stages(v.schedule, v.pp, v.chunks)


def group_fits(v: SimpleNamespace, g: int) -> bool:
    """Return whether microbatches can go around the ranks in groups of g."""
    p, m = v.pp, v.num_microbatches
    return bool(g >= m or (g >= p and (m % g == 0 or m % g >= p)))


def streams(v: SimpleNamespace) -> int:
    """Return the number of streams of microbatches in the schedule: one per copy of the model."""
    return len(PLACEMENTS[family(v).placement].copies)


def least_microbatches(v: SimpleNamespace) -> int:
    """Return the next number of microbatches that fills all streams equally."""
    least: int = max(family(v).rounds * v.pp, v.num_microbatches)
    return -(-least // streams(v)) * streams(v)


def even_split(v: SimpleNamespace) -> tuple[int, ...]:
    """Return the number of blocks of each stage, as equal as possible."""
    each, more = divmod(v.layers, stages(v))
    return tuple(each + (stage < more) for stage in range(stages(v)))


def order_of_a_file(name: str, words: str) -> Rule:
    """Return the row of a setting that a schedule file already determines."""
    return Rule(
        f"{name.replace('_', ' ')} and a file",
        (name, "schedule_csv"),
        "the file brings its own order of work",
        lambda v: v.schedule_csv is not None and getattr(v, name) != getattr(GridConfig, name),
        lambda v: {name: [None]},
        f"--schedule-csv 1f1b.csv --pp 2 --num-microbatches 4 {words}",
        ranks=2,
    )


def number_of_a_file(name: str, own: str, words: str) -> Rule:
    """Return the row of a number that a schedule file is made for. own: the number's name there."""
    return Rule(
        f"{name.replace('_', ' ')} of a file",
        (name, "schedule_csv"),
        "the schedule of the file is made for another number",
        lambda v: v.csv and getattr(v, name) != getattr(v.csv, own),
        lambda v: {name: [getattr(v.csv, own)], "schedule_csv": [None]},
        f"--schedule-csv 1f1b.csv {words}",
        ranks=2,
        complete=True,
    )


OF_SCHEDULES = (
    Rule(
        "name of a schedule",
        ("schedule",),
        f"there are {', '.join(SCHEDULES)} (mpipar schedule --compare shows their times)",
        lambda v: v.schedule not in FAMILIES,
        lambda v: {"schedule": get_close_matches(v.schedule, SCHEDULES, n=1) or ["1f1b"]},
        "--schedule interleavd",
    ),
    Rule(
        "passes of a step",
        ("num_microbatches", "pp", "schedule", "chunks"),
        f"a schedule has at most {MOST_PASSES:,} forward passes, which take seconds to prove",
        lambda v: family(v) and stages(v) * v.num_microbatches > MOST_PASSES,
        lambda v: {"num_microbatches": [max(1, MOST_PASSES // stages(v))]},
        "--schedule interleaved --chunks 64 --num-microbatches 8192",
        complete=True,
    ),
    Rule(
        "chunks of a schedule",
        ("chunks", "schedule"),
        "only looped schedules take any number of stages on a rank",
        lambda v: (
            family(v) and not family(v).looped and v.chunks not in (None, family(v).stages_per_rank)
        ),
        lambda v: {"schedule": ["interleaved"], "chunks": [None]},
        "--schedule 1f1b --chunks 2",
    ),
    Rule(
        "groups of a schedule",
        ("group_size", "schedule"),
        "only interleaved schedules send microbatches round the ranks in groups",
        lambda v: family(v) and v.group_size is not None and not family(v).grouped,
        lambda v: {"group_size": [None]},
        "--schedule gpipe --group-size 4",
    ),
    Rule(
        "short groups",
        ("group_size", "num_microbatches", "pp", "schedule"),
        "in a group with fewer microbatches than pipeline ranks, including the last one, a rank"
        " would wait for a forward pass that it is itself holding back",
        lambda v: (
            family(v)
            and family(v).grouped
            and v.group_size is not None
            and not group_fits(v, v.group_size)
        ),
        lambda v: {
            "group_size": [
                *[g for g in range(v.pp, v.num_microbatches) if group_fits(v, g)][:3],
                v.num_microbatches,
                None,
            ]
        },
        "--schedule interleaved --pp 2 --num-microbatches 5 --batch-size 5 --group-size 4",
        ranks=2,
        complete=True,
    ),
    Rule(
        "pairs of dualpipe",
        ("pp", "schedule"),
        "dualpipe pairs the pipeline ranks up, so their number is even",
        lambda v: family(v) and v.pp % streams(v) > 0,
        lambda v: {
            "pp": [p for p in (v.pp - 1, v.pp + 1) if p and could_be(v, "pp", p)],
            "schedule": ["dualpipe-v"],
        },
        "--schedule dualpipe --pp 3 --num-microbatches 8",
        ranks=6,
        complete=True,
    ),
    Rule(
        "streams of dualpipe",
        ("num_microbatches", "pp", "schedule"),
        "two full streams need at least 2 pp microbatches, and in dualpipe an even number",
        lambda v: family(v) and v.num_microbatches != least_microbatches(v),
        lambda v: {"num_microbatches": [least_microbatches(v), least_microbatches(v) + streams(v)]},
        "--schedule dualpipe --pp 2 --num-microbatches 3",
        ranks=2,
        complete=True,
    ),
    Rule(
        "number of stages",
        ("stage_layers", "schedule_csv", "schedule", "pp", "chunks"),
        "it must give the number of blocks for each stage of the schedule",
        lambda v: (
            v.stage_layers is not None and (v.csv or family(v)) and len(v.stage_layers) != stages(v)
        ),
        lambda v: {"stage_layers": [even_split(v), None]},
        "--stage-layers 2,1,1 --pp 2",
        ranks=2,
        complete=True,
    ),
    order_of_a_file("schedule", "--schedule gpipe"),
    order_of_a_file("chunks", "--chunks 2"),
    order_of_a_file("group_size", "--group-size 4"),
    number_of_a_file("pp", "pp_size", "--pp 1"),
    number_of_a_file("num_microbatches", "num_microbatches", "--pp 2 --num-microbatches 8"),
)

RULES = (*combinations.RULES, *OF_SCHEDULES)
