"""A pipeline in which one rank at a time is active, and what another schedule would take."""

from __future__ import annotations

from statistics import mean

from mpipar.console.bubble import measured_costs
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.pipeline.simulate import simulate
from mpipar.trace import pop
from mpipar.trace.trace_file import Trace

MOST_PER_RANK = 4  # microbatches for each pipeline rank; more gain little


def one_at_a_time(trace: Trace) -> list[tuple[str, float]]:
    """[(text, milliseconds lost per step)] if the schedule never has two ranks compute at once."""
    schedule = trace.schedule()
    size, count = schedule.pp_size, schedule.num_microbatches
    timeline = simulate(schedule, Costs())
    if size == 1 or sum(timeline.busy) > timeline.makespan or not pop.whole_steps(trace):
        return []
    facts = pop.pass_facts(trace)
    now = mean(max(fact["pipeline"][step] for fact in facts) for step in facts[0]["pipeline"])
    bubble = 1 - mean(row[1] for row in pop.pipeline_bubble(trace))
    text = f"bubble {bubble:.0%}: one of {size} pipeline ranks is active at a time"
    text += ", because one microbatch is in flight"
    parts = 1 if count > 1 else _parts(trace.meta["batch_size"] // trace.meta["layout"]["dp"], size)
    if count * parts == 1:
        return [(f"{text}; a batch of one row for each replica cannot be cut into more", 0.0)]
    costs = measured_costs(facts, schedule.num_stages)
    stages = [schedule.stages_of(place) for place in range(size)]
    whole = Costs(**{name: tuple(sum(getattr(costs, name)[stage] for stage in own) / parts
                                 for own in stages) for name in "fiw"})
    then = float(simulate(make_schedule("1f1b", size, count * parts), whole).makespan)
    how = "with these passes" if parts == 1 else (
        f"with these passes cut into {count * parts} microbatches")
    text += f"; 1f1b {how} would take {then * 1e3:.1f} ms, not {now * 1e3:.1f}"
    return [(text, max(0.0, (now - then) * 1e3))]


def _parts(rows: int, size: int) -> int:
    """Into how many microbatches the rows of a replica can be cut: a power of two that divides."""
    parts = 1
    while rows % (2 * parts) == 0 and parts < MOST_PER_RANK * size:
        parts *= 2
    return parts
