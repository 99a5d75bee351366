"""The search for a layout: all that can run and fit, in closed form.

Of each grid dp x pp x cp x tp x ep only the best layout is kept, so that the answers differ. Where
two are closer than the model is to measured steps, the one whose data groups cross fewer nodes is
first: sums over many nodes are what measured networks do worst.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from mpipar.config.grid import cuts_heads, divisors, matching, sizes_text
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.config.train import OPTIMIZERS
from mpipar.errors import UserError
from mpipar.pipeline.schedules.catalog import FAMILIES
from mpipar.run import resolve as run_resolve
from mpipar.run.files.settings import ParsedConfig
from mpipar.study.explain.predict import moments_of
from mpipar.study.plan.job import SPREAD, Layout, Shape, Stack, config_of
from mpipar.study.plan.machine import Machine, load_machine
from mpipar.study.plan.memory import GIB, Memory, by_rank, fullest, in_flight, on_shapes
from mpipar.study.plan.model import Block, Step, block_of, meeting_seconds, met, step_of, step_time

CHUNKS = (2, 3, 4, 5, 6, 7, 8, 10, 12)
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
TWICE = ("zb-h2", "zb-v")  # have the bubble of their formula with so many microbatches
MOST_ROWS = 64  # of a microbatch
INTERVALS = (1, 10, 50)  # steps from one meeting of islands to the next
LONG = 8192  # tokens from which cutting a sequence pays off
SHEETS = {"cpu": "cpu", "cuda": "h100"}  # device -> data sheet of --layout auto, without --machine


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


class Plan(NamedTuple):
    """The answer: the best layouts, best first.

    tied: the layout that the model finds fastest, if one within its error is first for its smaller
    data groups.
    """

    best: list[Candidate]
    tied: Candidate | None


def axes(question: Question) -> Iterator[tuple[int, int, int, int]]:
    """Yield (dp, pp, cp, tp) of every grid of the question's ranks that the model's sizes allow."""
    shape, fixed, node = question.shape, question.fixed, question.machine.per_node

    def sizes(name: str, ranks: int) -> list[int]:
        can = divisors(ranks) if name in question.stack.axes else [1]
        return [size for size in can if fixed.get(name, size) == size]

    for tp in sizes("tp", question.ranks):
        for pp in sizes("pp", question.ranks // tp):
            for cp in sizes("cp", question.ranks // tp // pp):
                dp = question.ranks // tp // pp // cp
                if not (
                    fixed.get("dp", dp) != dp
                    or not cuts_heads(tp, shape.heads, shape.kv_heads)
                    or (node % tp and tp != 2 * node and "tp" not in fixed)  # two nodes at most
                    or pp > shape.layers
                    or question.batch_size % dp
                    or (cp > 1 and shape.seq_len % (2 * cp))
                    or (cp > 1 and shape.seq_len // cp < LONG // 2 and "cp" not in fixed)
                ):
                    yield dp, pp, cp, tp


def cuts(question: Question) -> Iterator[Layout]:
    """Yield every layout that can be run, apart from its schedule."""
    fixed, stack, experts = question.fixed, question.stack, question.shape.experts or 1
    for dp, pp, cp, tp in axes(question):
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
            if not zero or data > 1:
                yield Layout(
                    dp,
                    pp,
                    cp,
                    tp,
                    rows,
                    share // rows,
                    sequence_parallel=parallel,
                    recompute=recompute,
                    zero=zero,
                    outer=outer,
                    ep=ep,
                )


def given(fixed: dict, name: str, choices: tuple) -> tuple:
    """Return the fixed value of a field, or all its choices."""
    return (fixed[name],) if name in fixed else choices


def schedules(question: Question, pp: int, m: int) -> Iterator[tuple[str, int]]:
    """Yield (schedule, chunks) that m microbatches can run on pp ranks."""
    if pp == 1 and question.fixed.get("schedule", "1f1b") == "1f1b":
        yield "1f1b", 1
    for name in given(question.fixed, "schedule", SCHEDULES) if pp > 1 else ():
        family = FAMILIES[name]
        for chunks in CHUNKS if family.looped else (family.stages_per_rank,):
            enough = m >= pp * (2 if name in TWICE else 1) and not (family.grouped and m % pp)
            if enough and pp * chunks <= question.shape.layers:
                yield name, chunks


def search(question: Question, count: int | None = 5) -> Plan:
    """Return the `count` layouts with the shortest step, None for those of all grids."""
    shape, machine, stack = question.shape, question.machine, question.stack
    best: dict[tuple, Candidate] = {}
    flights = cache(in_flight)
    memory = cache(lambda layout: fullest(shape, layout, stack, flights))
    known: dict[Layout, Block] = {}
    ways = [(cut, block_of(shape, cut, machine, stack, known)) for cut in cuts(question)]
    for cut, block in sorted(ways, key=lambda way: computing(shape, *way)):
        seconds, first = computing(shape, cut, block), best.get(cut.grid)
        for schedule, chunks in schedules(question, cut.pp, cut.num_microbatches):
            if first and first.step.modelled <= seconds:
                break  # no schedule makes it the best of its grid
            layout = cut._replace(schedule=schedule, chunks=chunks)
            held = memory(layout._replace(outer="pp"))
            if held.total <= question.gib * GIB:
                step = step_time(shape, layout, machine, stack, block)
                if not first or step.modelled < first.step.modelled:
                    first = best[cut.grid] = Candidate(layout, step, held)
    chosen = fewest_nodes_first(question, best.values())
    fastest = min(chosen, key=lambda one: one.step.modelled, default=None)
    return Plan(
        chosen[:count],
        None if fastest is None or fastest is chosen[0] else fastest,
    )


def computing(shape: Shape, layout: Layout, block: Block) -> float:
    """Return the least seconds that a layout's busiest rank computes, whatever the schedule."""
    each = block.f.total + block.i.total + block.w.total + block.again.total
    return layout.num_microbatches * shape.layers / layout.pp * each


def nodes_of_data(question: Question, layout: Layout) -> int:
    """Return how many nodes a data group spans."""
    return -(-layout.data_ranks * layout.data_stride // question.machine.per_node)


def fewest_nodes_first(question: Question, found: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates by time, in front the one of fewest nodes of those as fast as the fastest.

    Its memory is that of mpipar's own step, on shapes; what does not fit is removed.
    """
    ranked = sorted(found, key=lambda one: one.step.modelled)
    while ranked:
        near = [one for one in ranked if one.step.modelled <= within_error(ranked[0])]
        chosen = min(near, key=lambda one: nodes_of_data(question, one.layout))
        ranked.remove(chosen)
        if question.on_shapes is None:
            return [chosen, *ranked]
        memory = question.on_shapes(chosen.layout)
        if memory.total <= question.gib * GIB:
            return [chosen._replace(memory=memory), *ranked]
    return []


def within_error(fastest: Candidate) -> float:
    """Return the longest step, in seconds, that the model can't tell from the fastest one."""
    return fastest.step.modelled * (1 + SPREAD / 100)


def with_own_step(question: Question, named: Config) -> Question:
    """Return the question with the memory of mpipar's own step. named: names model and optimizer.

    A layout is asked about once, since slower links change no memory.
    """
    if not question.stack.own:
        return question
    shape, rules = question.shape, OPTIMIZERS[named.train.optimizer]
    matrices = shape.layers * shape.block_parameters / shape.parameters
    shares = {"matrices": matrices, "numbers": 1 - matrices}
    kept = sum(part * moments_of(named, rules[rule]) for rule, part in shares.items())
    kept += question.stack.number_bytes < 4  # the master weight
    question = question._replace(stack=replace(question.stack, optimizer_bytes=4 * kept))
    return question._replace(on_shapes=cache(partial(memory_on_shapes, named, question)))


def ways_across(question: Question, named: Config) -> list[tuple[Layout, int, float, float]]:
    """Return the best layout with replicas on all sites, and islands of the best one of a site.

    Each is (layout, steps from one meeting of islands to the next or 0 without them, seconds of a
    step, bytes that leave each site in it). Sites are what the last but one of at least three
    levels of links joins. Where gradients are sharded, weights cross the last one too.
    """
    shape, machine, fixed = question.shape, question.machine, question.fixed
    site = machine.links[-2].joins if len(machine.links) > 2 else question.ranks
    count, dp = question.ranks // site, fixed.get("dp", 0)
    if count < 2 or question.ranks % site or question.batch_size % count or dp % count:
        return []
    inside = question._replace(
        ranks=site,
        batch_size=question.batch_size // count,
        fixed=fixed | ({"dp": dp // count} if dp else {}),
    )
    ways = []
    across = search(question._replace(fixed=fixed | {"outer": "dp"}), None).best
    whole = fewest_nodes_first(question, [one for one in across if one.layout.dp % count == 0])
    for layout, step, _ in whole[:1]:
        weight, sums = question.stack.number_bytes, question.stack.sum_bytes
        gathered = layout.num_microbatches * (2 * weight + sums)
        of_number = {0: 2 * sums, 1: sums + weight, 3: gathered}[layout.zero]
        moved = of_number * (1 - 1 / layout.data_ranks) * shape.parameters
        ways.append((layout, 0, step.total, moved))
    alone = replace(named, grid=replace(named.grid, islands=1))
    for layout, step, _ in search(with_own_step(inside, alone), 1).best:
        meeting = meeting_seconds(shape, layout, machine, count)
        moved = 2 * (1 - 1 / count) * 4 * sum(met(shape, layout)) * site
        whole_layout = layout._replace(dp=layout.dp * count, outer="dp")
        ways += [
            (whole_layout, every, step.total + meeting / every, moved / every)
            for every in INTERVALS
        ]
    return ways


def memory_on_shapes(named: Config, question: Question, layout: Layout) -> Memory:
    """Return what mpipar's own step keeps on the rank that is fullest in closed form.

    Two microbatches for each pipeline rank fill it.
    """
    found = by_rank(question.shape, layout, question.stack)
    rank = max(found, key=lambda rank: found[rank].total)
    few = layout._replace(num_microbatches=min(layout.num_microbatches, 2 * layout.pp))
    config = config_of(named, question.shape, few, question.dtype, question.machine.device)
    return on_shapes(resolve(config, layout.ranks)[0], layout, rank)


# --- --layout auto


def legal_layouts(parsed: ParsedConfig, world_size: int) -> list[tuple[ParsedConfig, Config]]:
    """Return the configurations of every layout of these ranks, and what they resolve to.

    Axes that the user names stay, and so does cp. Only layouts with the smallest number of rows per
    step are considered, since a preset's number is rounded up to what a layout takes.
    """
    grid, found = parsed.config.grid, []
    for dp, pp, tp in matching((grid.dp, grid.pp, grid.tp), world_size, world_size, 0, 0, grid.cp):
        config = replace(parsed.config, grid=replace(grid, dp=dp, pp=pp, tp=tp))
        one = replace(parsed, config=config)
        with suppress(UserError):
            found.append((one, run_resolve.resolve(one, world_size)[0]))
    least = min((config.train.batch_size for _, config in found), default=0)
    return [pair for pair in found if pair[1].train.batch_size == least]


def with_best_layout(
    parsed: ParsedConfig, world_size: int, machine_name: str | None = None
) -> ParsedConfig:
    """Return the configuration with the best of several layouts, and a note, under --layout auto.

    Every rank finds the same one. If no layout can run, what is returned says why when it is
    resolved. Raises UserErrors for a machine that can't be read or lacks this model.
    """
    legal = legal_layouts(parsed, world_size) if parsed.chooses_layout else []
    if not legal:
        return parsed
    name = machine_name or SHEETS[legal[0][1].run.device]
    machine = load_machine(name, world_size)
    steps = [step_of(config, machine).total for _, config in legal]
    order = sorted(range(len(legal)), key=steps.__getitem__)
    words = ", ".join(
        f"{sizes_text(vars(legal[one][1].grid))} {steps[one] * 1e3:.3g} ms" for one in order
    )
    note = f"--layout auto: predicted steps by the data sheet {name}: {words}"
    return replace(legal[order[0]][0], notes=(*parsed.notes, note))
