"""--schedule auto: the schedule with the shortest simulated step that fits in memory."""

from collections.abc import Callable
from dataclasses import dataclass

from mpipar.errors import UsageError
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.forms import Number
from mpipar.pipeline.instructions import Schedule
from mpipar.pipeline.schedules.catalog import FAMILIES, SCHEDULES, make_schedule, schedule_problems
from mpipar.pipeline.simulate import simulate

FITS = "fits"
OVER = "needs more memory than a rank has"


@dataclass(frozen=True)
class Candidate:
    """One schedule that was considered.

    makespan: time of the simulated step. peak_bytes: weights and stash of the fullest rank.
    messages: number sent by all ranks. These three are None where the schedule cannot take the
    counts. verdict: FITS, or why it is rejected.
    """

    name: str
    makespan: Number | None
    peak_bytes: Number | None
    messages: int | None
    verdict: str


def choose_schedule(
    pp_size: int,
    num_microbatches: int,
    costs_of: Callable[[Schedule], Costs],
    memory_cap_bytes: Number,
    chunks: int | None = None,
) -> tuple[str, tuple[Candidate, ...]]:
    """Return the name of the shortest schedule under the cap, and all candidates, best first.

    costs_of(schedule) returns the Costs of the model split into its stages (see Costs.merged and
    Costs.divided). memory_cap_bytes limits weight_bytes and stash on one rank. Of equally short
    schedules, the one with less memory wins, then the one with fewer messages. If none fits, raises
    UsageError, which says what the smallest one needs.
    """
    table = [
        consider_schedule(name, pp_size, num_microbatches, costs_of, memory_cap_bytes, chunks)
        for name in SCHEDULES
    ]
    table.sort(key=preference)
    if table[0].verdict == FITS:
        return table[0].name, tuple(table)
    sizes = [(each.peak_bytes, each.name) for each in table if each.peak_bytes is not None]
    if not sizes:
        raise UsageError([f"--schedule auto: {each.verdict}" for each in table])
    least, name = min(sizes)
    raise UsageError(
        f"--schedule auto: no schedule fits in {memory_cap_bytes} bytes per rank; {name} needs the "
        f"least, {least}: use a larger --pp or a smaller microbatch"
    )


def preference(candidate: Candidate) -> tuple[Number, ...]:
    """Return the sort key: those that fit come first, then less makespan, bytes and messages."""
    numbers = (candidate.makespan, candidate.peak_bytes, candidate.messages)
    return (candidate.verdict != FITS, *(number or 0 for number in numbers))


def consider_schedule(
    name: str,
    pp_size: int,
    num_microbatches: int,
    costs_of: Callable[[Schedule], Costs],
    memory_cap_bytes: Number,
    chunks: int | None,
) -> Candidate:
    """Simulate one schedule; only looped schedules use `chunks`, the others fix their own."""
    if not FAMILIES[name].looped:
        chunks = None
    found = schedule_problems(name, pp_size, num_microbatches, chunks)
    if found:
        return Candidate(name, None, None, None, found[0])
    schedule = make_schedule(name, pp_size, num_microbatches, chunks)
    costs = costs_of(schedule)
    timeline = simulate(schedule, costs)
    weights = costs.by_stage("weight_bytes", schedule.num_stages)
    peak = max(
        stash + sum(weights[stage] for stage in schedule.stages_of(pp_rank))
        for pp_rank, stash in enumerate(timeline.peak_stash_bytes)
    )
    verdict = FITS if peak <= memory_cap_bytes else OVER
    return Candidate(name, timeline.makespan, peak, sum(timeline.messages), verdict)
