"""The time of a pipeline's passes: a lower bound, and the simulator.

The bound costs microseconds, the simulator up to a second, so a search ranks by the bound, and
simulates until no remaining bound could still win.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from mpipar.pipeline.check import check_programs, runnable_order
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.instructions import is_compute
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.plan.layout import Layout
from mpipar.plan.step_time import Blocks, Pipeline

Order = Callable[[str, int, int, int | None], list[tuple]]  # passes_in_order, perhaps cached


def stage_costs(layout: Layout, blocks: Blocks, counts: tuple[int, ...]) -> Costs:
    """Return the seconds of each stage's passes; the last adds a third of the head to each pass."""
    of_rank = {id(one): (one.f.total, one.i.total + one.again.total, one.w.total) for one in blocks}
    own = [of_rank[id(blocks[layout.rank_of(stage)])] for stage in range(len(counts))]
    head = blocks[layout.last_rank].head.total / 3
    found = [[count * one[way] for count, one in zip(counts, own, strict=True)] for way in range(3)]
    return Costs(*((*each[:-1], each[-1] + head) for each in found))


def bound(layout: Layout, blocks: Blocks, counts: tuple[int, ...]) -> float:
    """Return a lower bound of the seconds that the passes take.

    A rank computes all its passes. With consecutive stages it first waits until a microbatch has
    reached it. The gradient it sends last still travels up the pipeline; with a split backward its
    own weight gradients may fill that time.
    """
    costs, m, p = stage_costs(layout, blocks, counts), layout.num_microbatches, layout.pp
    passes = [f + i + w for f, i, w in zip(costs.f, costs.i, costs.w, strict=True)]
    if layout.folded:
        return m * max(sum(passes[stage] for stage in layout.held(rank)) for rank in range(p))
    found, there = 0.0, 0.0
    for rank in range(p):
        found = max(found, there + m * sum(passes[rank::p]))
        there += costs.f[rank] if layout.family.split else passes[rank]
    return found


def balanced(layers: int, layout: Layout, blocks: Blocks) -> float:
    """Return the seconds of all passes if each rank had just as much to do as it is fast.

    No split of the blocks over the ranks takes less, and no schedule.
    """
    last = blocks[layout.last_rank]
    return (
        layout.num_microbatches
        * (layers + last.head.total / last.total)
        / sum(1 / block.total for block in blocks)
    )


def passes_in_order(name: str, pp: int, num_microbatches: int, chunks: int | None) -> list[tuple]:
    """Return (rank, kind, stage, messages needed, messages sent) of each pass, in order.

    The schedule is built and proved.
    """
    schedule = make_schedule(name, pp, num_microbatches, chunks)
    check_programs(schedule)
    return [
        (rank, instr.kind, instr.stage, tuple(received), tuple(sent))
        for rank, instr, received, sent in runnable_order(schedule)
        if is_compute(instr)
    ]


def timeline(
    layout: Layout, blocks: Blocks, counts: tuple[int, ...], order: Order = passes_in_order
) -> float:
    """Return the simulated seconds of the passes, in the schedule's order.

    The first rounds of zb-v and zb-h2 grow by less than later ones, so what they extrapolate to may
    be below the bound.
    """
    costs = stage_costs(layout, blocks, counts)
    return max(
        bound(layout, blocks, counts), makespan(layout, layout.num_microbatches, costs, order)
    )


def cached_timeline() -> Pipeline:
    """Return `timeline` with a cache: it builds and proves the order of each schedule once."""
    return partial(timeline, order=cache(passes_in_order))


def makespan(layout: Layout, num_microbatches: int, costs: Costs, order: Order) -> float:
    """Return the simulated seconds of a step of `num_microbatches` microbatches.

    With many of them, each further round of pp microbatches adds the same time to a step, so two
    short steps are enough to extrapolate to a long one.
    """
    if num_microbatches > 5 * layout.pp:
        rounds, rest = divmod(num_microbatches, layout.pp)
        short, longer = (
            makespan(layout, count * layout.pp + rest, costs, order) for count in (3, 4)
        )
        return longer + (rounds - 4) * (longer - short)
    seconds = {
        "F": costs.f,
        "I": costs.i,
        "W": costs.w,
        "B": tuple(map(sum, zip(costs.i, costs.w, strict=True))),
    }
    clock, arrival = [0.0] * layout.pp, {}
    free = layout.chunks if layout.family.looped else None
    for rank, kind, stage, received, sent in order(
        layout.schedule, layout.pp, num_microbatches, free
    ):
        now = max([clock[rank], *map(arrival.pop, received)]) + seconds[kind][stage]
        clock[rank] = now
        for message in sent:
            arrival[message] = now
    return max(clock)
