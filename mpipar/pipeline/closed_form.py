"""What is known in closed form about a schedule with equal stages, to print beside the simulation.

Letters: p ranks, m microbatches, v chunks, f i w costs of a chunk, b = i + w. Sources: the papers
named at the schedules; every form is checked against the simulator by the tests.
"""

from dataclasses import dataclass
from numbers import Real

from mpipar.pipeline.instructions import Schedule
from mpipar.plan.costs import Costs


@dataclass(frozen=True)
class ClosedForm:
    """Formulas and their values; None where none is known for these counts and costs.

    bubble: makespan minus busy time of a rank, on links that cost nothing. peak_stash: most
    chunk-activations on any rank, an upper bound where bound is set. messages: of all ranks.
    hops: how many link latencies a small constant latency adds to the makespan.
    """

    bubble_formula: str | None
    bubble: Real | None
    peak_formula: str
    peak_stash: int
    bound: bool
    messages_formula: str
    messages: int
    hops_formula: str | None
    hops: int | None


def closed_form(schedule: Schedule, costs: Costs) -> ClosedForm | None:
    """The closed forms of a schedule made here; None for other schedules and unequal stages."""
    unequal = any(isinstance(cost, tuple) for cost in (costs.f, costs.i, costs.w))
    if schedule.name not in PEAKS or schedule.wired or unequal:
        return None
    p, m = schedule.pp_size, schedule.num_microbatches
    v = schedule.num_stages // p
    bubble_formula, bubble = bubble_of(schedule.name, p, m, v, costs)
    peak_formula, peak = PEAKS[schedule.name]
    hops_formula, hops = hops_of(schedule.name, p, m, v, costs)
    messages_formula, messages = messages_of(schedule.placement, p, m, v)
    return ClosedForm(
        bubble_formula, bubble, peak_formula, peak(p, m, v), schedule.name in ("v-half", "v-min"),
        messages_formula, messages, hops_formula, hops,
    )
