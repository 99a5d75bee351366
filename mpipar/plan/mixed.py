"""Devices of several kinds in one job: stages of unequal length, and what an even split would lose.

The kinds stand one behind the other along the pipeline. So no group of tp or of dp has two kinds,
in which the slower one would set the pace of each barrier. A stage has as many blocks as its
devices compute in the time that all stages have, and as fit in their memory.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heapreplace
from itertools import permutations
from typing import NamedTuple

from mpipar.pipeline.costs import Costs
from mpipar.plan.block_time import BlockTimes, block_times
from mpipar.plan.cluster import Cluster
from mpipar.plan.collectives import exchange
from mpipar.plan.footprint import GIB, Footprint, rank_footprints
from mpipar.plan.layout import Layout, blocks_of_stages, rank_parameters
from mpipar.plan.pipeline_time import Pipelines
from mpipar.plan.search import Question, layouts, search
from mpipar.plan.step_time import (
    StepTime,
    compute_of,
    hop_seconds,
    sum_seconds,
    tp_of,
    update_seconds,
    window_of,
)


class Kind(NamedTuple):
    """Devices of one kind. gib: memory that a rank may use."""

    cluster: Cluster
    ranks: int
    gib: float


class Uneven(NamedTuple):
    """A layout over kinds in the order of the pipeline. counts: blocks of each stage.

    memory: of each rank of the pipeline. even: seconds with as many blocks on each stage, or None
    where that does not fit.
    """

    layout: Layout
    kinds: tuple[Kind, ...]
    counts: tuple[int, ...]
    step: StepTime
    memory: tuple[Footprint, ...]
    even: float | None

    @property
    def by_rank(self) -> list[Kind]:
        """The kind of each pipeline rank."""
        return kinds_by_rank(self.layout, self.kinds)


class MixedPlan(NamedTuple):
    """The answer: the best layouts, best first; counts of rejected ones.

    alone: the step on each kind by itself. alike: the step if each device worked as the slowest
    kind. None where nothing fits.
    """

    best: list[Uneven]
    rejected: dict[str, int]
    alone: dict[str, float | None]
    alike: float | None


def kinds_by_rank(layout: Layout, kinds: tuple[Kind, ...]) -> list[Kind]:
    """The kind of each pipeline rank, which has whole stages of one kind."""
    each = layout.ranks // layout.pp
    return [kind for kind in kinds for _ in range(kind.ranks // each)]


def search_mixed(question: Question, kinds: tuple[Kind, ...], count: int = 5,
                 tell=lambda text: None) -> MixedPlan:
    """The `count` best layouts over these kinds. question: its cluster has the smallest nodes.

    As in `search`, a bound ranks the layouts, and the simulator judges until none can win.
    """
    rejected, ranked = Counter(), []
    for layout in layouts(question, rejected):
        if layout.pp == 1 or layout.chunks > 1:
            rejected["kinds need pp of 2 or more, and one stage on a rank"] += 1
        elif any(kind.ranks % (layout.ranks // layout.pp) for kind in kinds):
            rejected["a stage would have two kinds of devices"] += 1
        else:
            least = least_seconds(question, layout, kinds)
            ranked += [(least, layout, order) for order in permutations(kinds)]
    ranked.sort(key=lambda one: one[0])
    best: dict[tuple, Uneven] = {}
    pipelines = Pipelines()
    for below, layout, order in ranked:
        known = sorted(one.step.total for one in best.values())[:count]
        if len(known) == count and below > known[-1]:
            break
        tell(f"{len(ranked):,} layouts of several kinds, the best {known[0] if known else 0:.3f} s")
        found = judged(question, layout, order, pipelines)
        if found is None:
            rejected["does not fit in memory"] += 1
        elif layout.grid not in best or found.step.total < best[layout.grid].step.total:
            best[layout.grid] = found
    ordered = sorted(best.values(), key=lambda one: one.step.total)
    slowest = min(kinds, key=lambda kind: kind.cluster.product_tflops)
    alike = question._replace(
        cluster=slowest.cluster, gib=min(kind.gib for kind in kinds))
    return MixedPlan(
        ordered[:count], dict(rejected.most_common()),
        {kind.cluster.name: seconds_of(question._replace(
            cluster=kind.cluster, ranks=kind.ranks, gib=kind.gib)) for kind in kinds},
        seconds_of(alike))


def seconds_of(question: Question) -> float | None:
    """The step of the best layout, or None where nothing fits."""
    best = search(question, 1).best
    return best[0].step.total if best else None


def least_seconds(question: Question, layout: Layout, kinds: tuple[Kind, ...]) -> float:
    """A bound of the step from below: all blocks at the speed of all stages together."""
    shape, stack = question.shape, question.stack
    each = layout.ranks // layout.pp
    speed = sum(kind.ranks // each / block_times(shape, layout, kind.cluster, stack).total
                for kind in kinds)
    return layout.num_microbatches * shape.layers / speed


def judged(question: Question, layout: Layout, kinds: tuple[Kind, ...],
           pipelines: Pipelines) -> Uneven | None:
    """The layout with the blocks that its kinds take, and with the same for all; None: no room."""
    shape, stack = question.shape, question.stack
    by_rank = kinds_by_rank(layout, kinds)
    known = {kind.cluster.name: block_times(shape, layout, kind.cluster, stack) for kind in kinds}
    blocks = [known[kind.cluster.name] for kind in by_rank]
    counts = shares(shape.layers, layout, blocks, room(question, layout, by_rank))
    if counts is None:
        return None
    step = step_of(question, layout, by_rank, blocks, counts, pipelines)
    memory = memory_of(question, layout, counts)
    same = blocks_of_stages(shape.layers, layout.stages)
    even = None
    if all(one.total <= kind.gib * GIB for one, kind in zip(
            memory_of(question, layout, same), by_rank, strict=True)):
        even = step_of(question, layout, by_rank, blocks, same, pipelines).total
    return Uneven(layout, kinds, counts, step, memory, even)


def memory_of(question: Question, layout: Layout, counts: tuple[int, ...]) -> tuple:
    """The Footprint of each pipeline rank."""
    return tuple(rank_footprints(
        question.shape, layout, question.stack, counts, range(layout.pp)))


def room(question: Question, layout: Layout, by_rank: list[Kind]) -> list[int]:
    """The most blocks that fit on each pipeline rank: memory grows evenly with them."""
    one, two = (memory_of(question, layout, (number,) * layout.pp) for number in (1, 2))
    return [int(1 + (kind.gib * GIB - first.total) // (second.total - first.total))
            for kind, first, second in zip(by_rank, one, two, strict=True)]


def shares(layers: int, layout: Layout, blocks: list[BlockTimes],
           most: list[int]) -> tuple[int, ...] | None:
    """Blocks of each stage, so that the slowest stage is as short as can be; None without room.

    Each block goes where the stage is then shortest. The last stage also has the head.
    """
    counts = [1] * layout.pp
    if min(most) < 1 or sum(most) < layers:
        return None
    seconds = [block.total for block in blocks]
    heads = [(rank == layout.last_rank) * blocks[rank].head for rank in range(layout.pp)]
    queue = [(2 * seconds[rank] + heads[rank], rank) for rank in range(layout.pp)
             if most[rank] > 1]
    heapify(queue)
    for _ in range(layers - layout.pp):
        while counts[queue[0][1]] >= most[queue[0][1]]:
            heapreplace(queue, (float("inf"), queue[0][1]))
        rank = queue[0][1]
        counts[rank] += 1
        heapreplace(queue, ((counts[rank] + 1) * seconds[rank] + heads[rank], rank))
    return tuple(counts)


def step_of(question: Question, layout: Layout, by_rank: list[Kind], blocks: list[BlockTimes],
            counts: tuple[int, ...], pipelines: Pipelines) -> StepTime:
    """The step of a layout, with the parts of its busiest pipeline rank."""
    shape, stack, m = question.shape, question.stack, layout.num_microbatches

    def passes(of) -> tuple[float, ...]:
        found = [count * of(block) for count, block in zip(counts, blocks, strict=True)]
        found[layout.last_rank] += blocks[layout.last_rank].head / 3
        return tuple(found)

    costs = Costs(passes(lambda block: block.f.total),
                  passes(lambda block: block.i.total + block.again.total),
                  passes(lambda block: block.w.total))
    whole = pipelines.makespan(layout, m, costs)
    busy = [m * (f + i + w) for f, i, w in zip(costs.f, costs.i, costs.w, strict=True)]
    rank = max(range(layout.pp), key=busy.__getitem__)
    block, times = blocks[rank], m * counts[rank]
    head = (rank == layout.last_rank) * m * block.head
    elements = [rank_parameters(shape, layout, one, counts) for one in range(layout.pp)]
    sums = max(sum_seconds(shape, layout, kind.cluster, stack, size, window_of(layout, *own))
               for kind, size, own in zip(by_rank, elements, zip(blocks, counts, strict=True),
                                          strict=True))
    update = max(update_seconds(layout, kind.cluster, stack, size)
                 for kind, size in zip(by_rank, elements, strict=True))
    return StepTime(
        times * compute_of(block) + head, times * block.again.total, times * tp_of(block),
        times * (block.f.cp + block.i.cp), whole - busy[rank],
        messages_seconds(question, layout, by_rank),
        times * (block.f.gathers + block.i.gathers) + sums, update)


def messages_seconds(question: Question, layout: Layout, by_rank: list[Kind]) -> float:
    """Seconds of messages between stages, by the slowest links. The network joins two kinds.

    Of more ranks than a node has, `hop_seconds` counts that already.
    """
    shape, stack = question.shape, question.stack
    clusters = {kind.cluster.name: kind.cluster for kind in by_rank}.values()
    message = (layout.rows * shape.tokens / layout.cp * shape.width * stack.number_bytes
               / layout.tp)
    between = max(exchange(cluster, message, cluster.per_node()) for cluster in clusters)
    joins = len(clusters) - 1 if layout.ranks <= question.cluster.per_node() else 0
    return (max(hop_seconds(shape, layout, cluster, stack) for cluster in clusters)
            + 2 * joins * between)
