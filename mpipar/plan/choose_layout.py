"""--layout auto and --schedule auto: the layout and the schedule with the shortest predicted step.

The simulated passes of a layout give a lower bound of its step. Layouts are judged in the order of
their bounds, until the next one cannot win. The judge is the real step on shapes, which tells what
a rank holds, and which sums follow the pipeline.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mpipar.config.grid import AUTO
from mpipar.config.layout import sizes_text
from mpipar.config.sections import Config
from mpipar.console.tables import nbytes, table
from mpipar.errors import UsageError
from mpipar.pipeline.choose import Candidate, choose_schedule
from mpipar.pipeline.schedules.catalog import FAMILIES
from mpipar.pipeline.simulate import simulate
from mpipar.plan.machine import Machine
from mpipar.plan.measure import EQUAL_SHARES, unit_counts
from mpipar.plan.step import StepEstimate, schedule_costs, step_estimate
from mpipar.train.build import configured_schedule


class Scheduled(NamedTuple):
    """A layout with a schedule. seconds: of its passes. considered: the schedules, if it chose."""

    config: Config
    seconds: float
    considered: tuple[Candidate, ...]


def choose(configs: list[Config], machine: Machine) -> tuple[Config, list[str]]:
    """Return the config with the shortest step, auto replaced by its schedule, and lines that say
    why.

    configs: resolved, the same job in several layouts. Raises UsageError if none fits
    --memory-limit, or if the cost model lacks what all of them need.
    """
    if len(configs) == 1:
        one = scheduled(configs[0], machine)
        return one.config, schedule_notes(one, machine)
    ranked, rejected = [], {}
    for config in configs:
        try:
            ranked.append(scheduled(config, machine))
        except UsageError as error:
            rejected[words(config)] = error.problems[0]
    ranked.sort(key=lambda one: one.seconds)
    judged: dict[int, StepEstimate] = {}
    for place, one in enumerate(ranked):
        if judged and one.seconds > min(step.total for step in judged.values()):
            break
        try:
            judged[place] = fitting_estimate(one.config, machine)
        except UsageError as error:
            rejected[words(one.config)] = error.problems[0]
    if not judged:
        raise UsageError([f"--layout auto: {name}: {reason}" for name, reason in rejected.items()])
    first = min(judged, key=lambda place: judged[place].total)
    notes = [
        (
            f"--layout auto: {words(ranked[first].config)} has the shortest predicted step of"
            f" {len(configs)} layouts"
        ),
        ranking(ranked, judged, first, rejected),
    ]
    if judged[first].extrapolated:
        notes.append(f"extrapolated, not measured: {'; '.join(judged[first].extrapolated)}")
    return ranked[first].config, [*notes, *schedule_notes(ranked[first], machine)]


def scheduled(config: Config, machine: Machine) -> Scheduled:
    """Return a layout with its schedule, which is chosen if it is auto. Raises UsageError."""
    costs = schedule_costs(machine, config)
    grid = config.grid
    if grid.schedule != AUTO:
        schedule = configured_schedule(grid)
        seconds = simulate(schedule, costs.merged(unit_counts(config, schedule))).makespan
        return Scheduled(config, float(seconds), ())
    name, considered = choose_schedule(
        grid.pp,
        grid.num_microbatches,
        lambda schedule: costs.merged(unit_counts(config, schedule)),
        config.run.memory_limit or float("inf"),
        grid.chunks,
    )
    return Scheduled(with_schedule_name(config, name), float(considered[0].makespan), considered)


def with_schedule_name(config: Config, schedule: str) -> Config:
    """Return the config with a schedule's name, and with --chunks only if the schedule takes it."""
    chunks = config.grid.chunks if FAMILIES[schedule].looped else None
    return replace(config, grid=replace(config.grid, schedule=schedule, chunks=chunks))


def fitting_estimate(config: Config, machine: Machine) -> StepEstimate:
    """Return the predicted step. Raises UsageError if a rank needs more than --memory-limit."""
    step, limit = step_estimate(machine, config), config.run.memory_limit
    if limit is not None and step.peak_bytes > limit:
        raise UsageError(
            f"its fullest rank needs {nbytes(step.peak_bytes)}, and --memory-limit is"
            f" {nbytes(limit)}"
        )
    return step


def words(config: Config) -> str:
    """Return the layout of a config."""
    return sizes_text(vars(config.grid))


def ranking(
    ranked: list[Scheduled], judged: dict[int, StepEstimate], first: int, rejected: dict[str, str]
) -> str:
    """Return the table of layouts: the chosen one, the others by step, and why the rest are out."""
    rows = [
        (
            "layout",
            "schedule",
            "predicted step",
            "passes",
            "sums",
            "update",
            "fullest rank",
            "against the first",
        )
    ]
    best = judged[first]
    order = sorted(judged, key=lambda place: (place != first, judged[place].total))
    for place in order:
        step, one = judged[place], ranked[place]
        rows.append(
            (
                words(one.config),
                one.config.grid.schedule,
                *(
                    f"{seconds * 1e3:.1f} ms"
                    for seconds in (step.total, step.pipeline, step.barriers, step.update)
                ),
                nbytes(step.peak_bytes),
                "" if place == first else why_not(best, step),
            )
        )
    rows += [
        (
            words(one.config),
            one.config.grid.schedule,
            f"> {one.seconds * 1e3:.1f} ms",
            *[""] * 4,
            "its passes alone take longer",
        )
        for place, one in enumerate(ranked)
        if place not in judged and words(one.config) not in rejected
    ]
    rows += [(name, *[""] * 6, reason) for name, reason in rejected.items()]
    return table(rows, left=2)


def why_not(first: StepEstimate, other: StepEstimate) -> str:
    """Return how much longer a step is, and which part adds most."""
    more = {
        "passes": other.pipeline - first.pipeline,
        "sums": other.barriers - first.barriers,
        "update": other.update - first.update,
    }
    worst = max(more, key=more.get)
    percent = 100 * (other.total / first.total - 1)
    return f"{percent:+.0f} %, most of it in {worst}"


def schedule_notes(one: Scheduled, machine: Machine) -> list[str]:
    """Return why this schedule was chosen, and caveats of its prediction."""
    grid, notes = one.config.grid, []
    if one.considered:
        notes = [
            f"--schedule auto: {grid.schedule} has the shortest simulated step",
            schedules_table(one.considered),
        ]
    if grid.num_ranks > machine.cores:
        notes.append(f"more ranks than cores: {EQUAL_SHARES}")
    return notes


def schedules_table(considered: tuple[Candidate, ...]) -> str:
    """Return the table of considered schedules, best first."""
    rows = [("schedule", "simulated step", "weights and stash", "")]
    for each in considered:
        known = each.makespan is not None
        rows.append(
            (
                each.name,
                f"{each.makespan * 1e3:.1f} ms" if known else "",
                nbytes(each.peak_bytes) if known else "",
                each.verdict,
            )
        )
    return table(rows)
