"""Exercises whose answer is a schedule: a CSV file, proved, timed, and run by the engine."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from mpipar.learn import small_model
from mpipar.learn.exercise import Asked, Exercise, Verdict, plain
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.csv_format import read_csv
from mpipar.pipeline.instructions import Schedule, ScheduleError
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.pipeline.simulate import simulate


class Budget(NamedTuple):
    """The limits of a schedule.

    p, m: workers and microbatches. model: a schedule of mpipar that keeps them, and why it does.
    bubble: share of the step, in percent. stash: microbatches of a worker's layers.
    """

    p: int
    m: int
    model: str
    bubble: float
    stash: int
    why: str


BUDGETS = {
    "5b": Budget(
        4,
        8,
        "1f1b",
        27.3,
        4,
        "each worker runs a backward as soon as it can, which frees"
        " a microbatch. No more than p are on their way down and back up",
    ),
    "10b": Budget(
        2,
        8,
        "zb-h1",
        5.0,
        2,
        "I produces what the other worker waits for. W can wait, and fills the gaps",
    ),
}
TASKS = {
    "5b": "Write a schedule of 4 workers and 8 microbatches, with a whole backward B of 2 units and"
    " a forward F of 1. Its step must not be longer than the 33 units of GPipe, and no worker"
    " may hold more than 4 microbatches.",
    "10b": "Write a schedule of 2 workers and 8 microbatches, in which F, I and W take 1 unit each."
    " At most 5 % of the step may be bubble, and no worker may hold more than 2"
    " microbatches. With 1F1B, the bubble is 11 %.",
}
FORM = (
    " The file has a line for each worker, as `mpipar schedule naive --pp {p}"
    " --num-microbatches {m} --csv -` prints it. With `mpiexec -n {p}` in front, the engine"
    " runs it too."
)


def exercises() -> list[Exercise]:
    """Return one exercise per budget."""
    return [
        Exercise(
            number,
            TASKS[number] + FORM.format(p=budget.p, m=budget.m),
            "--file my.csv",
            partial(judge, number, budget),
            ranks=(budget.p,),
        )
        for number, budget in BUDGETS.items()
    ]


def judge(number: str, budget: Budget, asked: Asked) -> Verdict:
    """Return the verdict on a schedule that must keep a budget."""
    why = [
        (
            f"why: {budget.model} keeps within it: {budget.why}. See `mpipar schedule"
            f" {budget.model} --pp {budget.p} --num-microbatches {budget.m}`"
        )
    ]
    schedule = asked.agree(lambda: proved(asked.file))
    if isinstance(schedule, ScheduleError):
        return Verdict(False, [*schedule.problems, "such a schedule cannot run -> WRONG", *why])
    rows = [*sizes(schedule, budget)]
    if all(right for right, _ in rows):
        rows += times(schedule, budget)
    right = all(one for one, _ in rows)
    lines = [
        "proved: every pass runs once and in order, and no ranks wait in a circle",
        *(f"{line} -> {'right' if one else 'WRONG'}" for one, line in rows),
    ]
    if right and asked.world is not None:
        right, run = by_engine(asked, budget)
        lines += run
    elif right:
        lines.append(
            f"to let the engine run it too: mpiexec -n {budget.p} mpipar learn check"
            f" {number} --file {asked.file}"
        )
    return Verdict(right, [*lines, *why])


def proved(path) -> Schedule | ScheduleError:
    """Return the schedule of a file, or why it cannot run. UsageError for what is no schedule."""
    try:
        return read_csv(path)
    except ScheduleError as error:
        return error


def sizes(schedule, budget: Budget):
    """Return (whether it is right, line) for each count of the schedule."""
    for name, have, want in (
        ("workers", schedule.pp_size, budget.p),
        ("microbatches", schedule.num_microbatches, budget.m),
    ):
        yield have == want, f"{name}: {have}, asked for {want}"


def times(schedule, budget: Budget):
    """Return (whether it is right, line) for bubble, step and stash."""
    stages = schedule.num_stages // schedule.pp_size
    found = simulate(schedule, Costs().divided(stages))
    longest = simulate(make_schedule(budget.model, budget.p, budget.m), Costs()).makespan
    stash = Fraction(max(found.peak_stash), stages)
    bubble = 100 * found.bubble_share
    yield (
        bubble < budget.bubble + 0.05,
        (
            f"bubble: {bubble:.1f} % of a step of {plain(found.makespan)} units, at most"
            f" {budget.bubble:g} % (a step of {plain(longest)} does)"
        ),
    )
    yield stash <= budget.stash, f"stash: {plain(stash)} microbatches, at most {budget.stash}"


def by_engine(asked: Asked, budget: Budget) -> tuple[bool, list[str]]:
    """Return (whether the engine's step equals one rank's, lines that say so)."""
    config = small_model.small_config(
        {"pp": budget.p},
        budget.m,
        model=replace(small_model.MODEL, layers=budget.p),
        schedule_csv=str(asked.file),
    )
    expected = small_model.expected_tensors(config, asked.world)
    outcome = small_model.step_beside(config, asked.world, expected)
    wrong = outcome.wrong
    lines = [
        (
            f"run by the engine on {budget.p} ranks: {len(outcome.differences) - len(wrong)} of"
            f" {len(outcome.differences)} tensors equal those of one rank"
        )
    ]
    return not wrong, lines + [small_model.in_words(one) for one in wrong[:3]]
