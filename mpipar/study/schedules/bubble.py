"""Busy fraction and bubble of each pipeline rank, measured and simulated.

The measured fraction compares compute spans with the time from start to end of the pipeline, for
the traced steps. All ranks start a step together, because they have just agreed on the
previous step's norm, so the slowest rank's duration is that of the step and no clocks need to be
compared. The simulation runs the same schedule with the measured mean cost of each stage's passes
and instantaneous messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from mpipar.comm.record import PASSES, Span
from mpipar.pipeline.instructions import Schedule
from mpipar.run.console.tables import table
from mpipar.study.schedules.simulate import Costs, simulate

Facts = dict[str, dict[Any, float]]  # of a rank, see span_facts
Row = tuple[int, float, float, float, float]  # see bubble_rows


def span_facts(spans: Iterable[Span], whole: set[int]) -> Facts:
    """Return a rank's mean seconds per pass (by kind, stage), and busy and pipeline s per step.

    whole: the steps to include.
    """
    passes: dict[str, list[float]] = defaultdict(list)
    busy: dict[int, float] = defaultdict(float)
    pipeline: dict[int, float] = defaultdict(float)
    for span in (span for span in spans if span.step in whole):
        seconds = (span.end_ns - span.start_ns) * 1e-9
        if span.kind in PASSES:
            passes[f"{span.kind}{span.stage}"].append(seconds)
            busy[span.step] += seconds
        elif span.kind == "pipeline":
            pipeline[span.step] += seconds
    return {
        "passes": {key: sum(values) / len(values) for key, values in passes.items()},
        "busy": {step: busy[step] for step in whole},
        "pipeline": dict(pipeline),
    }


def measured_costs(facts: list[Facts], num_stages: int) -> Costs:
    """Return f, i, w of each stage, averaged over the ranks that ran it; i and w halve a B."""
    sums = defaultdict(list)
    for fact in facts:
        for key, seconds in fact["passes"].items():
            sums[key].append(seconds)
    mean = {key: sum(values) / len(values) for key, values in sums.items()}
    halves = {
        kind + key[1:]: full / 2 for key, full in mean.items() if key[0] == "B" for kind in "IW"
    }
    f, i, w = (
        tuple((mean | halves)[f"{kind}{stage}"] for stage in range(num_stages)) for kind in "FIW"
    )
    return Costs(f, i, w)


def bubble_rows(facts: list[Facts], pp_ranks: list[int], schedule: Schedule) -> list[Row]:
    """Return (pipeline rank, busy share, bubble in seconds, and both as simulated) of each.

    facts: `span_facts` of every world rank. pp_ranks: their pipeline ranks.
    """
    timeline = simulate(schedule, measured_costs(facts, schedule.num_stages))
    steps = set.intersection(*(set(fact["busy"]) for fact in facts))
    durations = {step: max(fact["pipeline"][step] for fact in facts) for step in steps}
    total = sum(durations.values())
    rows = []
    for pp_rank in range(schedule.pp_size):
        members = [fact for fact, place in zip(facts, pp_ranks, strict=True) if place == pp_rank]
        busy = sum(fact["busy"][step] for fact in members for step in steps) / len(members)
        simulated = timeline.busy_share[pp_rank], float(timeline.global_bubble[pp_rank])
        rows.append((pp_rank, busy / total, (total - busy) / len(steps), *simulated))
    return rows


def bubble_table(rows: list[Row]) -> str:
    """Return the rows as text."""
    head = ("pipeline rank", "busy measured", "simulated", "bubble measured", "simulated")
    lines = [
        (pp_rank, f"{busy:.1%}", f"{share:.1%}", f"{bubble * 1e3:.1f} ms", f"{idle * 1e3:.1f} ms")
        for pp_rank, busy, bubble, share, idle in rows
    ]
    return table([head, *lines])
