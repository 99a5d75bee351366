"""Pipeline schedules by name and counts, as pure data: who computes what, in which order.

A row of FAMILIES has the function that makes a schedule, and its properties. The orders are made in
the other files of this folder. Letters: p = pp_size, r = pp_rank, m = num_microbatches, v = chunks
(stages per rank).
"""

from collections.abc import Callable
from difflib import get_close_matches
from typing import NamedTuple

from mpipar.errors import UsageError
from mpipar.pipeline.instructions import Instr, Schedule
from mpipar.pipeline.placements import PLACEMENTS
from mpipar.pipeline.schedules.looped import interleaved, interleaved_zb, looped_bfs
from mpipar.pipeline.schedules.simple import (
    eager_one_f_one_b,
    gpipe,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from mpipar.pipeline.schedules.v_shape import dualpipe_v, v_half, v_min, zb_v


class Family(NamedTuple):
    """How a schedule is made and what is known about it.

    order: the passes of one rank, order(p, r, m), or order(p, r, m, v) where v is free. placement:
    a row of PLACEMENTS. grouped: whether microbatches come in groups of p. split: whether each
    backward is split into I and W. rounds: the order needs at least rounds * p microbatches.
    """

    order: Callable[..., list[Instr]]
    placement: str = "linear"
    grouped: bool = False
    split: bool = False
    rounds: int = 0

    @property
    def looped(self) -> bool:
        """Whether the number of chunks is free."""
        return PLACEMENTS[self.placement].free

    @property
    def stages_per_rank(self) -> int:
        """num_stages / p; where that is free, its default."""
        return PLACEMENTS[self.placement].chunks


FAMILIES = {
    "naive": Family(naive),
    "gpipe": Family(gpipe),
    "1f1b": Family(one_f_one_b),
    "eager-1f1b": Family(eager_one_f_one_b),
    "interleaved": Family(interleaved, "looped", grouped=True),
    "looped-bfs": Family(looped_bfs, "looped"),
    "zb-h1": Family(zb_h1, split=True),
    "zb-h2": Family(zb_h2, split=True),
    "interleaved-zb": Family(interleaved_zb, "looped", grouped=True, split=True),
    "zb-v": Family(zb_v, "v", split=True),
    "v-half": Family(v_half, "v", split=True),
    "v-min": Family(v_min, "v", split=True),
    "dualpipe-v": Family(dualpipe_v, "v", rounds=2),
}
SCHEDULES = tuple(FAMILIES)


def num_stages(name: str, pp_size: int, chunks: int | None = None) -> int:
    """Return the number of stages of the model; only the looped placement uses `chunks`."""
    return pp_size * (chunks or FAMILIES[name].stages_per_rank)


MOST_PASSES = 1 << 18  # forward passes of a step, which take some seconds to prove


class Limit(NamedTuple):
    """Counts that a schedule cannot have.

    settings: those it relates. broken: (family, p, m, v) -> whether they are illegal; v is None by
    default. sentence: why, and what to use instead.
    """

    name: str
    settings: tuple[str, ...]
    broken: Callable[[Family, int, int, int | None], bool]
    sentence: str


LIMITS = (
    Limit(
        "passes of a step",
        ("num_microbatches", "pp", "schedule", "chunks"),
        lambda family, p, m, v: p * (v or family.stages_per_rank) * m > MOST_PASSES,
        f"a schedule has at most {MOST_PASSES:,} forward passes, which take seconds to prove; use a"
        " smaller --num-microbatches",
    ),
    Limit(
        "chunks of a schedule",
        ("chunks", "schedule"),
        lambda family, p, m, v: not family.looped and v not in (None, family.stages_per_rank),
        "only looped schedules take any number of stages on a rank; leave --chunks out, or use"
        " --schedule interleaved",
    ),
    Limit(
        "streams of a schedule",
        ("num_microbatches", "pp", "schedule"),
        lambda family, p, m, v: m < family.rounds * p,
        "two streams that cross need at least 2 pp microbatches; use --num-microbatches from"
        " 2 * {pp} on",
    ),
)


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
    """Return everything wrong with these counts for this schedule: why, and what to use instead."""
    counts = {"--pp": pp_size, "--num-microbatches": num_microbatches, "--chunks": chunks}
    given = {flag: count for flag, count in counts.items() if count is not None}
    found = [f"{flag} {count}: must be at least 1" for flag, count in given.items() if count < 1]
    if name not in FAMILIES:
        close = "".join(f"; did you mean {one}?" for one in get_close_matches(name, FAMILIES, 1))
        found.append(f"--schedule {name!r}: must be one of {', '.join(FAMILIES)}{close}")
    if found:
        return found
    words = " ".join(f"{flag} {count}" for flag, count in given.items())
    return [
        f"--schedule {name} with {words}: {limit.sentence.format(pp=pp_size)}"
        for limit in LIMITS
        if limit.broken(FAMILIES[name], pp_size, num_microbatches, chunks)
    ]
