"""Which layout: every one that fits is ranked by a bound, and the simulator judges the first ones.

The order of work keeps the answer exact within the model. A layout that cannot be run or does not
fit is counted with its reason. The others are sorted by a bound of their step from below. They are
simulated in that order until the next bound exceeds the best simulated steps. Of each grid dp x pp
x cp x tp only the best layout is kept, so that the answers differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from mpipar.config.layout import cuts_heads, divisors
from mpipar.pipeline.schedules.catalog import FAMILIES
from mpipar.plan.cluster import Cluster, Stack
from mpipar.plan.footprint import GIB, Footprint, footprint
from mpipar.plan.layout import Layout
from mpipar.plan.pipeline_time import Pipelines, bound
from mpipar.plan.shape import Shape
from mpipar.plan.step_time import StepTime, step_time

CHUNKS = (2, 3, 4, 5, 6, 7, 8, 10, 12)
SCHEDULES = tuple(name for name, family in FAMILIES.items() if family.planned)
MOST_ROWS = 64  # of a microbatch
LONG = 8192  # tokens from which a row is worth cutting
TOLD = 1000  # layouts between two calls of `tell`
LESS, MORE = 0.8, 1.2  # of the memory: what would be chosen then is part of the answer
FIXED = ("dp", "pp", "cp", "tp", "rows", "num_microbatches", "schedule", "chunks",
         "sequence_parallel", "recompute", "zero")


class Question(NamedTuple):
    """What is asked. gib: memory that a rank may use. fixed: fields of a Layout that are given.

    mfu_rule: one of MFU_RULES. dtype: number format, which cluster and stack are made for.
    """

    shape: Shape
    cluster: Cluster
    stack: Stack
    ranks: int
    batch_size: int
    gib: float
    fixed: dict
    mfu_rule: str = "model"
    dtype: str = "bfloat16"


class Candidate(NamedTuple):
    """A layout that fits, with the parts of its step and of its fullest rank's memory."""

    layout: Layout
    step: StepTime
    memory: Footprint


class Plan(NamedTuple):
    """The answer: the best layouts, best first, and the number of rejected ones by reason.

    least: a layout that is closest to fitting, where none does. front: (bound of the step, GiB,
    layout) of each layout of which no other has less of both. memory: the best layout with 20 %
    less and with 20 % more memory; None where nothing fits.
    """

    best: list[Candidate]
    fitting: int
    simulated: int
    rejected: dict[str, int]
    least: Candidate | None
    front: list[tuple[float, float, Layout]]
    memory: list[Candidate | None]


def axes(question: Question, rejected: Counter) -> Iterator[tuple[int, int, int, int]]:
    """(dp, pp, cp, tp) of every grid of so many ranks that the model's sizes allow."""
    shape, fixed = question.shape, question.fixed
    for tp in divisors(question.ranks):
        for pp in divisors(question.ranks // tp):
            for cp in divisors(question.ranks // tp // pp):
                dp = question.ranks // tp // pp // cp
                if any(fixed.get(name, size) != size for name, size in (
                        ("dp", dp), ("pp", pp), ("cp", cp), ("tp", tp))):
                    continue
                if not cuts_heads(tp, shape.heads, shape.kv_heads):
                    rejected["tp does not divide the heads"] += 1
                elif not fills_nodes(tp, question.cluster.per_node()) and "tp" not in fixed:
                    rejected["tp does not fill a node evenly, or crosses more than two"] += 1
                elif pp > shape.layers:
                    rejected["more stages than blocks"] += 1
                elif question.batch_size % dp:
                    rejected["dp does not divide the batch"] += 1
                elif shape.tokens % (2 * cp):
                    rejected["cp does not divide the tokens"] += 1
                elif cp > 1 and shape.tokens // cp < LONG // 2 and "cp" not in fixed:
                    rejected["rows too short for cp"] += 1
                else:
                    yield dp, pp, cp, tp


def fills_nodes(tp: int, per_node: int) -> bool:
    """Whether groups of tp lie inside nodes, or fill two of them."""
    return per_node % tp == 0 or tp == 2 * per_node


def layouts(question: Question, rejected: Counter) -> Iterator[Layout]:
    """Every layout that can be run; what cannot is counted."""
    fixed, stack = question.fixed, question.stack
    recomputes = ("none", "block") if stack.fused else ("none", "attention", "block")
    for dp, pp, cp, tp in axes(question, rejected):
        share = question.batch_size // dp
        for rows in microbatches(share, fixed, rejected):
            for schedule, chunks in schedules(question, pp, share // rows, rejected):
                for recompute in given(fixed, "recompute", recomputes):
                    for zero in given(fixed, "zero", (0, 1, 3) if dp * cp > 1 else (0,)):
                        if zero and dp * cp == 1:
                            rejected["zero needs two ranks of dp x cp to share"] += 1
                            continue
                        for parallel in given(fixed, "sequence_parallel",
                                              (False, True) if tp > 1 else (False,)):
                            yield Layout(dp, pp, cp, tp, rows, share // rows, schedule, chunks,
                                         parallel, recompute, zero)


def microbatches(share: int, fixed: dict, rejected: Counter) -> list[int]:
    """Rows that a microbatch can have. share: rows of a step on each replica."""
    found = [rows for rows in divisors(share) if fixed.get("rows", rows) == rows
             and fixed.get("num_microbatches", share // rows) * rows == share]
    if not found:
        rejected["the given microbatches do not make up a replica's share of the batch"] += 1
    given_any = fixed.keys() & {"rows", "num_microbatches"}
    return [rows for rows in found if rows <= MOST_ROWS or given_any]


def given(fixed: dict, name: str, choices: tuple) -> tuple:
    """The fixed value of a field, or all its choices."""
    return (fixed[name],) if name in fixed else choices


def schedules(question: Question, pp: int, m: int, rejected: Counter) -> Iterator[tuple[str, int]]:
    """(schedule, chunks) that m microbatches can run on pp ranks."""
    if pp == 1:
        yield "1f1b", 1
        return
    for name in given(question.fixed, "schedule", SCHEDULES):
        family = FAMILIES[name]
        own = (family.stages_per_rank,)
        for chunks in given(question.fixed, "chunks", CHUNKS) if family.looped else own:
            if chunks > 1 and pp * chunks > question.shape.layers:
                rejected["more stages than blocks"] += 1
            elif family.grouped and m % pp:
                rejected[f"{name} needs a multiple of pp microbatches"] += 1
            elif m < pp:
                rejected["fewer microbatches than pipeline ranks"] += 1
            elif not family.looped and m < pp * chunks:
                rejected[f"{name} needs {chunks} pp microbatches"] += 1
            else:
                yield name, chunks


def search(question: Question, count: int = 5, tell=lambda text: None) -> Plan:
    """The `count` layouts with the shortest simulated step. tell: is called with the state."""
    rejected, ranked, fitting = Counter(), [], 0
    shape, cluster, stack = question.shape, question.cluster, question.stack
    least, room = None, question.gib * GIB
    for seen, layout in enumerate(layouts(question, rejected)):
        if seen % TOLD == 0:
            tell(f"{seen:,} layouts of {question.ranks} ranks, {fitting:,} fit")
        memory = footprint(shape, layout, stack)
        if memory.total > room:
            rejected["does not fit in memory"] += 1
            if least is None or memory.total < least[1].total:
                least = layout, memory
        fitting += memory.total <= room
        if memory.total <= MORE * room:
            ranked.append((step_time(shape, layout, cluster, stack, bound).total, layout, memory))
    ranked.sort(key=lambda one: one[0])
    pipelines = Pipelines()
    fit = [one for one in ranked if one[2].total <= room]
    best, tried = judged(question, fit, count, pipelines, lambda tried: tell(
        f"{fitting:,} layouts fit, {tried:,} simulated"))
    closest = None
    if least and not best:
        closest = Candidate(least[0], step_time(shape, least[0], cluster, stack, bound), least[1])
    other = [judged(question, [one for one in ranked if one[2].total <= factor * room], 1,
                    pipelines)[0] for factor in (LESS, MORE)]
    return Plan(best, fitting, tried, dict(rejected.most_common()), closest, trade_off(fit),
                [found[0] if found else None for found in other])


def judged(question: Question, ranked: list[tuple], count: int, pipelines: Pipelines,
           tell=lambda tried: None) -> tuple[list[Candidate], int]:
    """(the best `count` of (bound, layout, memory) in ascending order, how many were simulated)."""
    best: dict[tuple, Candidate] = {}
    tried = 0
    for below, layout, memory in ranked:
        known = best.get(layout.grid)
        if len(best) >= count and below > kth_best(best, count):
            break
        if known is None or below < known.step.total:
            tried += 1
            tell(tried)
            step = step_time(question.shape, layout, question.cluster, question.stack,
                             pipelines.simulated)
            found = with_best_order(question, Candidate(layout, step, memory), pipelines)
            if known is None or found.step.total < known.step.total:
                best[layout.grid] = found
    return in_order(best)[:count], tried


def other_order(layout: Layout, cluster: Cluster) -> Layout | None:
    """The same layout with dp across the nodes, and pp inside of them where it can be; or None."""
    if layout.cp > 1 or min(layout.dp, layout.pp) == 1 or layout.ranks <= cluster.per_node():
        return None
    return layout._replace(outer="dp")


def with_best_order(question: Question, one: Candidate, pipelines: Pipelines) -> Candidate:
    """The candidate with dp as its outermost axis, if that makes the step shorter."""
    other = other_order(one.layout, question.cluster)
    if other is None:
        return one
    step = step_time(question.shape, other, question.cluster, question.stack, pipelines.simulated)
    return one._replace(layout=other, step=step) if step.total < one.step.total else one


def trade_off(ranked: list[tuple]) -> list[tuple[float, float, Layout]]:
    """Of (bound, layout, memory) in ascending order, those with less memory than all before."""
    found, least = [], float("inf")
    for below, layout, memory in ranked:
        if memory.total < least:
            least = memory.total
            found.append((below, least / GIB, layout))
    return found


def kth_best(best: dict[tuple, Candidate], count: int) -> float:
    """Seconds of the step of the last layout that would be printed."""
    return sorted(one.step.total for one in best.values())[count - 1]


def in_order(best: dict[tuple, Candidate]) -> list[Candidate]:
    """The candidates by their steps."""
    return sorted(best.values(), key=lambda one: one.step.total)
