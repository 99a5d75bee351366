"""The search for a layout: all that fit are ranked by a bound, and the simulator judges the first.

The order of work keeps the answer exact within the model. A layout that cannot be run or does not
fit is counted with its reason. The others are sorted by a lower bound of their step, and simulated
in that order until the next bound exceeds the best simulated steps. Of each grid dp x pp x cp x tp
x ep only the best layout is kept, so that the answers differ.

Devices of several kinds follow one another along the pipeline, so that no group of tp or dp mixes
kinds, where the slower one would set the pace of each barrier.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from mpipar.config.layout import cuts_heads, divisors
from mpipar.pipeline.schedules.catalog import FAMILIES
from mpipar.plan.block_time import BlockTimes, block_times
from mpipar.plan.cluster import Cluster, Stack
from mpipar.plan.footprint import GIB, Footprint, Kept, fullest_of, fullest_ranks, rank_footprints
from mpipar.plan.layout import Layout
from mpipar.plan.pipeline_time import balanced, bound, cached_timeline, timeline
from mpipar.plan.shape import Shape
from mpipar.plan.splits import splits
from mpipar.plan.step_time import Blocks, Pipeline, StepTime, step_of, step_time

CHUNKS = (2, 3, 4, 5, 6, 7, 8, 10, 12)
SCHEDULES = tuple(name for name, family in FAMILIES.items() if family.planned)
MOST_ROWS = 64  # of a microbatch
LONG = 8192  # tokens from which cutting a row pays off
TELL_EVERY = 1000  # layouts between two calls of `tell`
LESS, MORE = 0.8, 1.2  # of the memory: the choices with these are part of the answer
NO_TIME = StepTime(*[0.0] * len(StepTime._fields))  # of a layout without a bound
EQUAL = 1e-6  # steps that differ by less take the same time
FIXED = (
    "dp",
    "pp",
    "cp",
    "tp",
    "ep",
    "rows",
    "num_microbatches",
    "schedule",
    "chunks",
    "sequence_parallel",
    "recompute",
    "zero",
)


class Kind(NamedTuple):
    """Devices of one kind. gib: memory that a rank may use."""

    cluster: Cluster
    ranks: int
    gib: float


class Question(NamedTuple):
    """What is asked. kinds: of the devices. fixed: fields of a Layout that are given.

    mfu_rule: one of MFU_RULES. dtype: the number format that kinds and stack are set up for.
    """

    shape: Shape
    kinds: tuple[Kind, ...]
    stack: Stack
    batch_size: int
    fixed: dict
    mfu_rule: str = "model"
    dtype: str = "bfloat16"

    @property
    def ranks(self) -> int:
        """Devices of the job."""
        return sum(kind.ranks for kind in self.kinds)

    @property
    def per_node(self) -> int:
        """Devices of the smallest node: groups of tp fit inside the nodes of every kind."""
        return min(kind.cluster.per_node() for kind in self.kinds)

    def step(
        self,
        layout: Layout,
        clusters: Sequence[Cluster],
        counts: tuple[int, ...] | None = None,
        pipeline: Pipeline = timeline,
    ) -> StepTime:
        """Return the simulated step of a layout; see `step_time`."""
        return step_time(self.shape, layout, clusters, self.stack, pipeline, counts)

    def changed(self, change: Callable[[Kind], Kind]) -> Question:
        """Return the same question for other devices."""
        return self._replace(kinds=tuple(map(change, self.kinds)))


class Known:
    """What many layouts of a question have in common, computed once."""

    def __init__(self, question: Question):
        shape, stack = question.shape, question.stack
        clusters = {kind.cluster.name: kind.cluster for kind in question.kinds}
        orders = cache(fullest_of)
        self._times: Callable[[Layout, str], BlockTimes] = cache(
            lambda layout, name: block_times(shape, layout, clusters[name], stack)
        )
        self.kept: Callable[[Layout], Kept] = cache(
            lambda layout: Kept.of(shape, layout, stack, orders)
        )

    def blocks(self, layout: Layout, clusters: Sequence[Cluster]) -> Blocks:
        """Return the passes on each pipeline rank, which do not depend on the schedule."""
        same = layout._replace(schedule="1f1b", chunks=1)
        return [self._times(same, cluster.name) for cluster in clusters]


class Candidate(NamedTuple):
    """A layout on devices, with the parts of its step and of its fullest rank's memory.

    kinds: in the order of the pipeline. counts: blocks of each stage. used: the share that the
    fullest rank, whose memory this is, takes of what it may use. twins: layouts of other grids with
    the same step.
    """

    layout: Layout
    kinds: tuple[Kind, ...]
    counts: tuple[int, ...]
    step: StepTime
    memory: Footprint
    used: float
    twins: tuple[Layout, ...] = ()

    @property
    def by_rank(self) -> list[Kind]:
        """The kind of each pipeline rank."""
        return kinds_by_rank(self.layout, self.kinds)

    @property
    def clusters(self) -> list[Cluster]:
        """The devices of each pipeline rank."""
        return [kind.cluster for kind in self.by_rank]


class Plan(NamedTuple):
    """The answer: the best layouts, best first, and the number of rejected ones by reason.

    least: a layout that is closest to fitting, if none does. memory: the best one with 20 % less
    and with 20 % more memory, of the same splits of blocks; None where nothing fits. pipeline: the
    simulator, with the orders that it has built.
    """

    best: list[Candidate]
    fitting: int
    simulated: int
    rejected: dict[str, int]
    least: Candidate | None
    memory: list[Candidate | None]
    pipeline: Pipeline


def kinds_by_rank(layout: Layout, kinds: tuple[Kind, ...]) -> list[Kind]:
    """Return the kind of each pipeline rank; all its stages are on that kind."""
    each = layout.ranks // layout.pp
    return [kind for kind in kinds for _ in range(kind.ranks // each)]


def axes(question: Question, rejected: Counter) -> Iterator[tuple[int, int, int, int]]:
    """Yield (dp, pp, cp, tp) of every grid of the question's ranks that the model's sizes allow."""
    shape, fixed = question.shape, question.fixed
    for tp in divisors(question.ranks):
        for pp in divisors(question.ranks // tp):
            for cp in divisors(question.ranks // tp // pp):
                dp = question.ranks // tp // pp // cp
                if any(
                    fixed.get(name, size) != size
                    for name, size in (("dp", dp), ("pp", pp), ("cp", cp), ("tp", tp))
                ):
                    continue
                if not cuts_heads(tp, shape.heads, shape.kv_heads):
                    rejected["tp does not divide the heads"] += 1
                elif not fills_nodes(tp, question.per_node) and "tp" not in fixed:
                    rejected["tp does not fill a node evenly, or crosses more than two"] += 1
                elif pp > shape.layers:
                    rejected["more stages than blocks"] += 1
                elif question.batch_size % dp:
                    rejected["dp does not divide the batch"] += 1
                elif cp > 1 and shape.tokens % (2 * cp):
                    rejected["cp does not divide the tokens"] += 1
                elif cp > 1 and shape.tokens // cp < LONG // 2 and "cp" not in fixed:
                    rejected["rows too short for cp"] += 1
                elif any(kind.ranks * pp % question.ranks for kind in question.kinds):
                    rejected["a stage would have two kinds of devices"] += 1
                else:
                    yield dp, pp, cp, tp


def fills_nodes(tp: int, per_node: int) -> bool:
    """Return whether groups of tp stay inside nodes, or fill two of them."""
    return per_node % tp == 0 or tp == 2 * per_node


def layouts(question: Question, rejected: Counter) -> Iterator[Layout]:
    """Yield every layout that can be run; those that cannot are counted."""
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
                        for parallel in given(
                            fixed, "sequence_parallel", (False, True) if tp > 1 else (False,)
                        ):
                            for ep in experts(question, dp * cp, rejected):
                                yield Layout(
                                    dp,
                                    pp,
                                    cp,
                                    tp,
                                    rows,
                                    share // rows,
                                    schedule,
                                    chunks,
                                    parallel,
                                    recompute,
                                    zero,
                                    ep=ep,
                                )


def experts(question: Question, data_ranks: int, rejected: Counter) -> list[int]:
    """Return over how many ranks of dp x cp experts can be distributed; 1 for a model without."""
    common = math.gcd(question.shape.experts, data_ranks) if question.shape.experts else 1
    found = [ep for ep in divisors(common) if question.fixed.get("ep", ep) == ep]
    if not found:
        rejected["ep does not divide the experts and dp x cp"] += 1
    return found


def microbatches(share: int, fixed: dict, rejected: Counter) -> list[int]:
    """Return the rows that a microbatch can have. share: rows of a step on each replica."""
    found = [
        rows
        for rows in divisors(share)
        if fixed.get("rows", rows) == rows
        and fixed.get("num_microbatches", share // rows) * rows == share
    ]
    if not found:
        rejected["the given microbatches do not make up a replica's share of the batch"] += 1
    given_any = fixed.keys() & {"rows", "num_microbatches"}
    return [rows for rows in found if rows <= MOST_ROWS or given_any]


def given(fixed: dict, name: str, choices: tuple) -> tuple:
    """Return the fixed value of a field, or all its choices."""
    return (fixed[name],) if name in fixed else choices


def schedules(question: Question, pp: int, m: int, rejected: Counter) -> Iterator[tuple[str, int]]:
    """Yield (schedule, chunks) that m microbatches can run on pp ranks."""
    if pp == 1:
        if question.fixed.get("schedule", "1f1b") == "1f1b":
            yield "1f1b", 1
        else:
            rejected["the given schedule orders the stages of a pipeline"] += 1
        return
    for name in given(question.fixed, "schedule", SCHEDULES):
        family = FAMILIES[name]
        own = (family.stages_per_rank,)
        for chunks in given(question.fixed, "chunks", CHUNKS) if family.looped else own:
            if chunks > 1 and len(question.kinds) > 1:
                rejected["kinds need one stage on a rank"] += 1
            elif chunks > 1 and pp * chunks > question.shape.layers:
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
    """Return the `count` layouts with the shortest simulated step. tell: called with progress."""
    rejected, ranked, fitting = Counter(), [], 0
    least, known, pipeline = None, Known(question), cached_timeline()
    for seen, layout in enumerate(layouts(question, rejected)):
        if seen % TELL_EVERY == 0:
            tell(f"{seen:,} layouts of {question.ranks} ranks, {fitting:,} fit")
        found = [
            one
            for kinds in itertools.permutations(question.kinds)
            for one in placed(question, layout, kinds, known)
        ]
        ranked += [one for one in found if one.used <= MORE]
        closest = min(found, key=lambda one: one.used)
        if closest.used <= 1:
            fitting += 1
            continue
        rejected["does not fit in memory"] += 1
        if least is None or closest.used < least.used:
            least = closest
    ranked.sort(key=lambda one: one.step.total)
    fit = [one for one in ranked if one.used <= 1]
    best, tried = judged(
        question,
        fit,
        count,
        pipeline,
        lambda tried: tell(f"{fitting:,} layouts fit, {tried:,} simulated"),
    )
    other = [
        judged(question, [one for one in ranked if one.used <= factor], 1, pipeline)[0]
        for factor in (LESS, MORE)
    ]
    return Plan(
        best,
        fitting,
        tried,
        dict(rejected.most_common()),
        None if best else least,
        [found[0] if found else None for found in other],
        pipeline,
    )


def shortest(question: Question) -> float | None:
    """Return the seconds of the best layout's step, as `search` finds it; None if nothing fits.

    question: of one kind of devices. Best first: what has the lowest bound is looked at more
    closely, until that is a simulated step.
    """
    known, pipeline, number = Known(question), cached_timeline(), itertools.count()
    shape, (kind,) = question.shape, question.kinds
    queue: list[tuple[float, int, Layout | None, Candidate | None]] = [
        (
            min(
                balanced(shape.layers, one, known.blocks(one, [kind.cluster] * layout.pp))
                for one in orders_of(question, layout)
            ),
            next(number),
            layout,
            None,
        )
        for layout in layouts(question, Counter())
    ]
    heapify(queue)
    while queue:
        seconds, _, layout, one = heappop(queue)
        if layout:
            for found in placed(question, layout, question.kinds, known):
                if found.used <= 1:
                    heappush(queue, (found.step.total, next(number), None, found))
        elif one:
            step = simulated(question, one, pipeline).step
            heappush(queue, (step.total, next(number), None, None))
        else:
            return seconds
    return None


def placed(
    question: Question, layout: Layout, kinds: tuple[Kind, ...], known: Known | None = None
) -> Iterator[Candidate]:
    """Yield the layout with each split of its blocks over stages that may be best.

    Steps are bounds, in the better rank order. What would not fit even with MORE memory has none.
    """
    shape, stack, known = question.shape, question.stack, known or Known(question)
    by_rank = kinds_by_rank(layout, kinds)
    clusters = [kind.cluster for kind in by_rank]
    kept, blocks = known.kept(layout), cache(lambda: known.blocks(layout, clusters))

    def held(counts: tuple[int, ...]) -> list[tuple[float, Footprint]]:
        ranks = fullest_ranks(layout, counts, clusters if len(kinds) > 1 else ())
        return [
            (memory.total / (by_rank[rank].gib * GIB), memory)
            for rank, memory in zip(
                ranks, rank_footprints(shape, layout, stack, counts, ranks, kept), strict=True
            )
        ]

    held_once = cache(held)
    for counts in splits(
        shape,
        layout,
        stack,
        blocks,
        [kind.gib for kind in by_rank],
        lambda counts: [used for used, _ in held_once(counts)],
        kept,
    ):
        used, memory = max(held_once(counts))
        step = NO_TIME
        if used <= MORE:
            step = min(
                (
                    step_of(shape, one, clusters, known.blocks(one, clusters), stack, bound, counts)
                    for one in orders_of(question, layout)
                ),
                key=sum,
            )
        yield Candidate(layout, kinds, counts, step, memory, used)


def simulated(question: Question, one: Candidate, pipeline: Pipeline = timeline) -> Candidate:
    """Return a candidate with its simulated step, in the better rank order."""
    steps = {
        layout: question.step(layout, one.clusters, one.counts, pipeline)
        for layout in orders_of(question, one.layout)
    }
    layout = min(steps, key=lambda each: steps[each].total)
    return one._replace(layout=layout, step=steps[layout])


def judged(
    question: Question,
    ranked: list[Candidate],
    count: int,
    pipeline: Pipeline,
    tell=lambda tried: None,
) -> tuple[list[Candidate], int]:
    """Return (the best `count` of candidates sorted by bound, how many were simulated)."""
    best: dict[tuple, Candidate] = {}
    tried = 0
    for one in ranked:
        known, answers = best.get(one.layout.grid), in_order(best)
        if len(answers) >= count and one.step.total > answers[count - 1].step.total:
            break
        if known is None or one.step.total < known.step.total:
            tried += 1
            tell(tried)
            found = simulated(question, one, pipeline)
            if known is None or found.step.total < known.step.total:
                best[one.layout.grid] = found
    return in_order(best)[:count], tried


def orders_of(question: Question, layout: Layout) -> list[Layout]:
    """Return the layout, and with dp and pp swapped across nodes, if both are there."""
    if (
        layout.cp > 1
        or min(layout.dp, layout.pp) == 1
        or len(question.kinds) > 1
        or layout.ranks <= question.per_node
    ):
        return [layout]
    return [layout, layout._replace(outer="pp" if layout.outer == "dp" else "dp")]


def in_order(best: dict[tuple, Candidate]) -> list[Candidate]:
    """Return the candidates by step; of those with equal steps, the one with least memory."""
    found: list[Candidate] = []
    for one in sorted(best.values(), key=lambda one: (one.step.total, one.used)):
        if found and one.step.total <= found[-1].step.total * (1 + EQUAL):
            first, other = sorted((found[-1], one), key=lambda each: each.used)
            found[-1] = first._replace(twins=(*first.twins, other.layout, *other.twins))
        else:
            found.append(one)
    return found
