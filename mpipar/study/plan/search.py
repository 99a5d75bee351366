"""The search for a layout: all that can run and fit, in closed form.

Of each grid dp x pp x cp x tp x ep only the best layout is kept, so that the answers differ. Where
two are closer than the model is to measured steps, the one whose data groups cross fewer nodes is
first: sums over many nodes are what measured networks do worst.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from mpipar.config.grid import cuts_heads, divisors
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.errors import broken
from mpipar.pipeline.schedules.catalog import FAMILIES
from mpipar.study.explain.predict import moments_of
from mpipar.study.plan.job import Layout, Shape, Stack
from mpipar.study.plan.machine import Machine
from mpipar.study.plan.memory import GIB, Memory, by_rank, fullest, in_flight, on_shapes
from mpipar.study.plan.model import Block, Step, block_of, step_time
from mpipar.study.plan.of_config import config_of, meeting_seconds, met
from mpipar.train.optimizer import rules_of

CHUNKS = (2, 3, 4, 5, 6, 7, 8, 10, 12)
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
TWICE = ("zb-h2", "zb-v")  # have the bubble of their formula with so many microbatches
MOST_ROWS = 64  # of a microbatch
INTERVALS = (1, 10, 50)  # steps from one meeting of islands to the next
CLOSE = 1 / 12  # how far our own step on shapes may be from the closed form of its memory
LONG = 8192  # tokens from which cutting a sequence pays off


class Question(NamedTuple):
    """What is asked. gib: memory that a rank may use. fixed: fields of a Layout that are given.

    on_shapes: returns what a layout keeps in mpipar's own step; None without one.
    """

    shape: Shape
    machine: Machine
    ranks: int
    gib: float
    stack: Stack
    batch_size: int
    fixed: dict[str, object]
    dtype: str = "bfloat16"
    on_shapes: Callable[[Layout], Memory] | None = None


class Candidate(NamedTuple):
    """A layout with its step and the memory of its fullest rank."""

    layout: Layout
    step: Step
    memory: Memory


class Way(NamedTuple):
    """Training across the slowest links: seconds of a step, and bytes that leave each site in it.

    interval: steps from one meeting of islands to the next; both are 0 for data parallelism.
    """

    islands: int
    interval: int
    layout: Layout
    step_s: float
    site_bytes: float


class Plan(NamedTuple):
    """The answer: the best layouts, best first, and the number of rejected ones by reason.

    others: the best of further grids. seen: layouts that were weighed; those that their grid's best
    surely beats are not. least: the layout that is closest to fitting, if none does. tied: the
    layout that the model finds fastest, if one within its error is first for its smaller data
    groups.
    """

    best: list[Candidate]
    others: list[Candidate]
    seen: int
    rejected: dict[str, int]
    least: tuple[Layout, Memory] | None
    tied: Candidate | None


def axes(question: Question, rejected: Counter) -> Iterator[tuple[int, int, int, int]]:
    """Yield (dp, pp, cp, tp) of every grid of the question's ranks that the model's sizes allow."""
    shape, fixed, node = question.shape, question.fixed, question.machine.per_node

    def sizes(name: str, ranks: int) -> list[int]:
        can = divisors(ranks) if name in question.stack.axes else [1]
        return [size for size in can if fixed.get(name, size) == size]

    for tp in sizes("tp", question.ranks):
        for pp in sizes("pp", question.ranks // tp):
            for cp in sizes("cp", question.ranks // tp // pp):
                dp = question.ranks // tp // pp // cp
                if fixed.get("dp", dp) == dp and allowed(
                    rejected,
                    (
                        not cuts_heads(tp, shape.heads, shape.kv_heads),
                        "tp does not divide the heads",
                    ),
                    (
                        node % tp and tp != 2 * node and "tp" not in fixed,
                        "tp does not fill a node evenly, or crosses more than two",
                    ),
                    (pp > shape.layers, "more stages than blocks"),
                    (question.batch_size % dp, "dp does not divide the batch"),
                    (cp > 1 and shape.tokens % (2 * cp), "cp does not divide the tokens"),
                    (
                        cp > 1 and shape.tokens // cp < LONG // 2 and "cp" not in fixed,
                        "sequences too short for cp",
                    ),
                ):
                    yield dp, pp, cp, tp


def allowed(rejected: Counter, *checks: tuple[object, str]) -> bool:
    """Return whether no check (whether something is wrong, what) is broken; count the first."""
    reasons = broken(*checks)
    rejected.update(reasons[:1])
    return not reasons


def cuts(question: Question, rejected: Counter) -> Iterator[Layout]:
    """Yield every layout that can be run, apart from its schedule."""
    fixed, stack, experts = question.fixed, question.stack, question.shape.experts or 1
    for dp, pp, cp, tp in axes(question, rejected):
        share, data = question.batch_size // dp, dp * cp
        differ = dp > 1 and pp > 1 and question.ranks > question.machine.per_node
        for rows, recompute, zero, parallel, ep, outer in itertools.product(
            [rows for rows in divisors(share) if rows <= MOST_ROWS],
            given(fixed, "recompute", ("none", "block")),
            given(fixed, "zero", stack.zeros if data > 1 else (0,)),
            (False, True) if tp > 1 else (False,),
            [ep for ep in divisors(math.gcd(experts, data)) if fixed.get("ep", ep) == ep],
            given(fixed, "outer", ("pp", "dp") if differ else ("pp",)),
        ):
            m, alone = share // rows, zero and data == 1
            if allowed(rejected, (alone, "zero needs two ranks of dp x cp to share")):
                yield Layout(
                    dp, pp, cp, tp, rows, m, "1f1b", 1, parallel, recompute, zero, outer, ep
                )


def given(fixed: dict, name: str, choices: tuple) -> tuple:
    """Return the fixed value of a field, or all its choices."""
    return (fixed[name],) if name in fixed else choices


def schedules(question: Question, pp: int, m: int, rejected: Counter) -> Iterator[tuple[str, int]]:
    """Yield (schedule, chunks) that m microbatches can run on pp ranks."""
    if pp == 1:
        given_one = question.fixed.get("schedule", "1f1b") != "1f1b"
        if allowed(rejected, (given_one, "the given schedule orders the stages of a pipeline")):
            yield "1f1b", 1
        return
    for name in given(question.fixed, "schedule", SCHEDULES):
        family = FAMILIES[name]
        for chunks in CHUNKS if family.looped else (family.stages_per_rank,):
            if allowed(
                rejected,
                (pp * chunks > question.shape.layers, "more stages than blocks"),
                (family.grouped and m % pp, f"{name} needs a multiple of pp microbatches"),
                (m < pp, "fewer microbatches than pipeline ranks"),
                (m < 2 * pp and name in TWICE, f"{name} needs 2 pp microbatches"),
            ):
                yield name, chunks


def search(question: Question, count: int = 5) -> Plan:
    """Return the `count` layouts with the shortest step."""
    shape, machine, stack = question.shape, question.machine, question.stack
    rejected: Counter = Counter()
    best: dict[tuple, Candidate] = {}
    least: tuple[Layout, Memory] | None = None
    seen, flights = 0, cache(in_flight)
    memory = cache(lambda layout: fullest(shape, layout, stack, flights))
    known: dict[Layout, Block] = {}
    ways = [(cut, block_of(shape, cut, machine, stack, known)) for cut in cuts(question, rejected)]
    for cut, block in sorted(ways, key=lambda way: computing(shape, *way)):
        seconds, first = computing(shape, cut, block), best.get(cut.grid)
        for schedule, chunks in schedules(question, cut.pp, cut.num_microbatches, rejected):
            if first and first.step.modelled <= seconds:
                break  # no schedule makes it the best of its grid
            seen += 1
            layout = cut._replace(schedule=schedule, chunks=chunks)
            held = memory(layout._replace(outer="pp"))
            if held.total > question.gib * GIB:
                rejected["does not fit in memory"] += 1
                least = min(least or (layout, held), (layout, held), key=lambda one: one[1].total)
                continue
            step = step_time(shape, layout, machine, stack, block)
            if not first or step.modelled < first.step.modelled:
                first = best[cut.grid] = Candidate(layout, step, held)
    chosen = fewest_nodes_first(question, best.values(), rejected)
    fastest = min(chosen, key=lambda one: one.step.modelled, default=None)
    return Plan(
        chosen[:count],
        chosen[count:],
        seen,
        dict(rejected.most_common()),
        None if chosen else least,
        None if fastest is None or fastest is chosen[0] else fastest,
    )


def computing(shape: Shape, layout: Layout, block: Block) -> float:
    """Return the least seconds that a layout's busiest rank computes, whatever the schedule."""
    each = block.f.total + block.i.total + block.w.total + block.again.total
    return layout.num_microbatches * shape.layers / layout.pp * each


def nodes_of_data(question: Question, layout: Layout) -> int:
    """Return how many nodes a data group spans."""
    return -(-layout.data_ranks * layout.data_stride // question.machine.per_node)


def fewest_nodes_first(
    question: Question, found: Iterable[Candidate], rejected: Counter, exact: bool = True
) -> list[Candidate]:
    """Return candidates by time, in front the one of fewest nodes of those as fast as the fastest.

    Its memory is that of mpipar's own step, on shapes; what does not fit is removed. exact: whether
    its memory is asked for; otherwise only whether it fits, which the closed form may tell.
    """
    limit = question.gib * GIB
    ranked = sorted(found, key=lambda one: one.step.modelled)
    while ranked:
        close = ranked[0].step.modelled * (1 + question.stack.spread / 100)
        near = [one for one in ranked if one.step.modelled <= close]
        chosen = min(near, key=lambda one: nodes_of_data(question, one.layout))
        ranked = [one for one in ranked if one is not chosen]
        surely = not exact and chosen.memory.total * (1 + CLOSE) <= limit
        if question.on_shapes is None or not question.stack.own or surely:
            return [chosen, *ranked]
        memory = question.on_shapes(chosen.layout)
        if memory.total <= limit:
            return [chosen._replace(memory=memory), *ranked]
        rejected["does not fit in memory"] += 1
    return []


def with_own_step(question: Question, named: Config) -> Question:
    """Return the question with the memory of mpipar's own step. named: names model and optimizer.

    A layout is asked about once, since slower links change no memory.
    """
    if question.stack.own:
        shape, rules = question.shape, rules_of(named.train.optimizer)
        matrices = shape.layers * shape.block_parameters / shape.parameters
        shares = {"matrices": matrices, "numbers": 1 - matrices}
        kept = sum(part * moments_of(named, rules[rule]) for rule, part in shares.items())
        kept += question.stack.number_bytes < 4  # the master weight
        question = question._replace(stack=replace(question.stack, optimizer_bytes=4 * kept))
    return question._replace(on_shapes=cache(partial(memory_on_shapes, named, question)))


def ways_across(question: Question, named: Config) -> list[Way]:
    """Return data parallelism across the last of three levels of links, and islands inside it.

    Sites are what that level joins. Where gradients are sharded, weights cross it too.
    """
    shape, machine, fixed = question.shape, question.machine, question.fixed
    site = machine.links[-2].joins if len(machine.links) > 2 else question.ranks
    count, dp = question.ranks // site, fixed.get("dp", 0)
    if count < 2 or question.ranks % site or question.batch_size % count or dp % count:
        return []
    plan = search(question._replace(fixed=fixed | {"outer": "dp"}), 1)
    whole = [one for one in (*plan.best, *plan.others) if one.layout.dp % count == 0]
    ways = []
    for layout, step, _ in whole[:1]:
        weight, sums = question.stack.number_bytes, question.stack.sum_bytes
        of_number = {
            0: 2 * sums,
            1: sums + weight,
            3: layout.num_microbatches * (2 * weight + sums),
        }[layout.zero]
        moved = of_number * (1 - 1 / layout.data_ranks) * shape.parameters
        ways.append(Way(0, 0, layout, step.total, moved))
    inside = question._replace(
        ranks=site,
        batch_size=question.batch_size // count,
        fixed=fixed | ({"dp": dp // count} if dp else {}),
    )
    alone = replace(named, grid=replace(named.grid, islands=1))
    for layout, step, _ in search(with_own_step(inside, alone), 1).best:
        meeting = meeting_seconds(shape, layout, machine, count)
        moved = 2 * (1 - 1 / count) * 4 * sum(met(shape, layout)) * site
        whole_layout = layout._replace(dp=layout.dp * count)
        ways += [
            Way(count, every, whole_layout, step.total + meeting / every, moved / every)
            for every in INTERVALS
        ]
    return ways


def memory_on_shapes(named: Config, question: Question, layout: Layout) -> Memory:
    """Return what mpipar's own step keeps on the rank that is fullest in closed form.

    Two microbatches for each pipeline rank fill it, if need be one.
    """
    found, pp = by_rank(question.shape, layout, question.stack), layout.pp
    rank = max(found, key=lambda rank: found[rank].total)
    once, twice = (
        in_flight(layout.schedule, pp, layout.chunks, rank, many * pp) for many in (1, 2)
    )
    enough = pp if pp > 1 and once == twice else 2 * pp
    few = layout._replace(num_microbatches=min(layout.num_microbatches, enough))
    config = config_of(named, question.shape, few, question.dtype, question.machine.device)
    return on_shapes(resolve(config, layout.ranks)[0], layout, rank)
