"""The time of a pipeline's passes: a lower bound, and the simulator.

The bound costs microseconds, the simulator up to a second, so a search ranks by the bound, and
simulates until no remaining bound could still win.
"""

from __future__ import annotations

from mpipar.pipeline.check import check_programs, runnable_order
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.instructions import is_compute
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.plan.layout import Layout
from mpipar.plan.step_time import Blocks


def stage_costs(layout: Layout, blocks: Blocks, counts: tuple[int, ...]) -> Costs:
    """Return the seconds of each stage's passes; the last adds a third of the head to each pass."""
    of_rank = {id(one): (one.f.total, one.i.total + one.again.total, one.w.total)
               for one in blocks}
    own = [of_rank[id(blocks[layout.rank_of(stage)])] for stage in range(len(counts))]
    head = blocks[layout.last_rank].head.total / 3
    found = [[count * one[way] for count, one in zip(counts, own, strict=True)]
             for way in range(3)]
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


class Pipelines:
    """Simulated schedules. The order of a schedule's passes is built and proved once."""

    def __init__(self):
        self.orders: dict[tuple, list[tuple]] = {}

    def simulated(self, layout: Layout, blocks: Blocks, counts: tuple[int, ...]) -> float:
        """Return the seconds of the schedule's timeline."""
        costs = stage_costs(layout, blocks, counts)
        return self.makespan(layout, layout.num_microbatches, costs)

    def makespan(self, layout: Layout, num_microbatches: int, costs: Costs) -> float:
        """Return the simulated seconds of a step of `num_microbatches` microbatches.

        With many of them, each further round of pp microbatches adds the same time to a step, so
        two short steps are enough to extrapolate to a long one.
        """
        if num_microbatches > 5 * layout.pp:
            rounds, rest = divmod(num_microbatches, layout.pp)
            short, longer = (self.makespan(layout, count * layout.pp + rest, costs)
                             for count in (3, 4))
            return longer + (rounds - 4) * (longer - short)
        seconds = {"F": costs.f, "I": costs.i, "W": costs.w,
                   "B": tuple(map(sum, zip(costs.i, costs.w, strict=True)))}
        clock, arrival = [0.0] * layout.pp, {}
        for rank, kind, stage, received, sent in self.passes_in_order(layout, num_microbatches):
            now = max([clock[rank], *map(arrival.pop, received)]) + seconds[kind][stage]
            clock[rank] = now
            for message in sent:
                arrival[message] = now
        return max(clock)

    def passes_in_order(self, layout: Layout, num_microbatches: int) -> list[tuple]:
        """Return (rank, kind, stage, messages needed, messages sent) of each pass, in order."""
        key = layout.schedule, layout.pp, num_microbatches, layout.chunks
        if key not in self.orders:
            free = layout.chunks if layout.family.looped else None
            schedule = make_schedule(*key[:3], free)
            check_programs(schedule)
            self.orders[key] = [
                (rank, instr.kind, instr.stage, tuple(received), tuple(sent))
                for rank, instr, received, sent in runnable_order(schedule) if is_compute(instr)]
        return self.orders[key]
