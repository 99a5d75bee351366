"""The schedule explorer: one page that draws, proves and times pipeline schedules in a browser.

The page creates no schedules: Python generates the orders of all schedules for a grid of counts,
and the page carries them as data, in the form of CSV cells. What it does itself is in
explorer_page/; tests keep its proof and simulation equal to `pipeline.check` and
`study.schedules.simulate`.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
from importlib.resources import files
from itertools import product
from typing import Any

from mpipar.pipeline.instructions import Schedule, is_compute
from mpipar.pipeline.placements import PLACEMENTS
from mpipar.pipeline.schedules.catalog import FAMILIES, make_schedule, schedule_problems
from mpipar.run.console import html

RANKS = (1, 2, 3, 4, 5, 6, 7, 8)
MICROBATCHES = (*range(1, 17), 20, 24, 28, 32)
CHUNKS = (2, 3, 4)  # of looped schedules; the others fix theirs
SCRIPTS = ("schedule.js", "explorer.js")
Orders = dict[str, list[str] | str]  # see `known_orders`


def build(data: dict[str, Any], orders: Orders) -> str:
    """Return the page. data: its initial state. orders: see `known_orders`."""
    text = json.dumps(orders, separators=(",", ":"))
    packed = base64.b64encode(zlib.compress(text.encode("ascii"), 9)).decode("ascii")
    families = {
        name: {"placement": family.placement, "chunks": chunk_counts(name)}
        for name, family in FAMILIES.items()
    }
    stage_to_rank = {
        f"{family.placement} {p} {chunks}": PLACEMENTS[family.placement].stage_to_rank(
            p, p * chunks
        )
        for name, family in FAMILIES.items()
        for p in RANKS
        for chunks in chunk_counts(name)
    }
    facts = {
        "families": families,
        "stageToRank": stage_to_rank,
        "ranks": RANKS,
        "microbatches": MICROBATCHES,
    }
    return html.build(
        files("mpipar.study.schedules") / "explorer_page",
        SCRIPTS,
        facts | data,
        ORDERS=packed,
    )


def known_orders(
    ranks: Iterable[int] = RANKS, microbatches: Iterable[int] = MICROBATCHES
) -> Orders:
    """Return {"name p m chunks": passes of each rank, or why there is no such schedule}."""
    found: Orders = {}
    for name in FAMILIES:
        for p, m, chunks in product(ranks, microbatches, chunk_counts(name)):
            problems = schedule_problems(name, p, m, chunks)
            found[f"{name} {p} {m} {chunks}"] = (
                "; ".join(problems) if problems else passes(make_schedule(name, p, m, chunks))
            )
    return found


def chunk_counts(name: str) -> tuple[int, ...]:
    """Return the numbers of stages per rank that the page offers for a schedule."""
    family = FAMILIES[name]
    return CHUNKS if family.looped else (family.stages_per_rank,)


def passes(schedule: Schedule) -> list[str]:
    """Return the passes of each rank, as in the cells of a CSV file, separated by spaces."""
    return [
        " ".join(str(instr) for instr in program if is_compute(instr))
        for program in schedule.programs
    ]


def schedule_facts(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule that is not among the known orders as values for JSON."""
    return {
        "name": schedule.name,
        "p": schedule.pp_size,
        "m": schedule.num_microbatches,
        "stageToRank": schedule.stage_to_rank,
        "programs": passes(schedule),
    }
