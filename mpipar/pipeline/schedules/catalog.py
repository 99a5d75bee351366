"""Pipeline schedules by name and counts, as pure data: who computes what, in which order."""

from types import SimpleNamespace

from mpipar.config.grid import GridConfig
from mpipar.config.rule import broken_of
from mpipar.config.setting import value_problem
from mpipar.errors import UsageError
from mpipar.pipeline.combinations import OF_SCHEDULES
from mpipar.pipeline.instructions import Instr, Schedule
from mpipar.pipeline.schedules.families import FAMILIES, SCHEDULES, num_stages

__all__ = [
    "FAMILIES",
    "SCHEDULES",
    "make_schedule",
    "num_stages",
    "schedule_problems",
]


def make_schedule(
    name: str,
    pp_size: int,
    num_microbatches: int,
    chunks: int | None = None,
) -> Schedule:
    """Return the schedule of that name; UsageError names all problems of these counts at once."""
    found = schedule_problems(name, pp_size, num_microbatches, chunks)
    if found:
        raise UsageError(found)
    family = FAMILIES[name]
    looped = (chunks or family.stages_per_rank,) if family.looped else ()
    programs = tuple(
        with_reduce_grad(family.order(pp_size, pp_rank, num_microbatches, *looped))
        for pp_rank in range(pp_size)
    )
    stages = num_stages(name, pp_size, chunks)
    return Schedule(name, pp_size, stages, num_microbatches, family.placement, programs)


def with_reduce_grad(program: list[Instr]) -> tuple[Instr, ...]:
    """Return the program with REDUCE_GRAD(stage) after the last backward (B or W) of each stage.

    That is the earliest moment at which a stage's gradients are complete on this rank.
    """
    tail, missing = [], {stage for _, stage, *_ in program}
    position = len(program)
    while missing and position > 0:
        position -= 1
        kind, stage, _, stage_b, _ = program[position]
        if kind == "OVERLAP_F_B":
            kind, stage = "B", stage_b
        if kind in ("B", "W") and stage in missing:
            missing.remove(stage)
            tail.append(Instr("REDUCE_GRAD", stage))
        tail.append(program[position])
    return (*program[:position], *reversed(tail))


def schedule_problems(
    name: str,
    pp_size: int,
    num_microbatches: int,
    chunks: int | None = None,
) -> list[str]:
    """Return everything wrong with these counts for this schedule: rules and next valid values."""
    given = {
        "schedule": name,
        "pp": pp_size,
        "num_microbatches": num_microbatches,
        "chunks": chunks,
    }
    values = SimpleNamespace(**given, ranks=None, csv=None, schedule_csv=None)
    fields = GridConfig.__dataclass_fields__
    wrong = {
        one: value_problem(one, fields[one].metadata, value)
        for one, value in given.items()
        if value is not None
        and value not in FAMILIES  # may be a reader's own, not among the choices
    }
    bad = {one: text for one, text in wrong.items() if text}
    rules = broken_of(OF_SCHEDULES, values, bad)
    return [*bad.values(), *(rule.problem(values) for rule in rules)]
