"""Pipeline schedules by name, as pure data: who computes what, in which order.

Letters: p = pp_size, r = pp_rank, m = num_microbatches, v = chunks (stages per rank), g = group
size. This file makes the simple schedules; each other family has its own file.
"""

from collections.abc import Callable
from typing import NamedTuple

from mpipar.errors import UsageError, suggestion
from mpipar.files.text import brief
from mpipar.pipeline.instructions import Instr, Schedule
from mpipar.pipeline.schedules.dualpipe import dualpipe, dualpipe_v
from mpipar.pipeline.schedules.looped import interleaved, interleaved_zb, looped_bfs
from mpipar.pipeline.schedules.v_shape import v_half, v_min, zb_v
from mpipar.pipeline.schedules.zero_bubble import zb_h1, zb_h2


def naive(_p: int, r: int, m: int) -> list[Instr]:
    """One microbatch at a time goes down the ranks and back up; all ranks but one wait.

    p = 2, m = 2
    rank 0  F0 .. .. B0 F1 .. .. B1
    rank 1  .. F0 B0 .. .. F1 B1 ..
    """
    return [Instr(kind, r, mb) for mb in range(m) for kind in "FB"]


def gpipe(_p: int, r: int, m: int) -> list[Instr]:
    """All forwards, then all backwards; all microbatches are stashed at once (arXiv 1811.06965).

    p = 2, m = 3
    rank 0  F0 F1 F2 .. .. B0 B1 B2
    rank 1  .. F0 F1 F2 B0 B1 B2 ..
    """
    return [Instr(kind, r, mb) for kind in "FB" for mb in range(m)]


def one_f_one_b(p: int, r: int, m: int) -> list[Instr]:
    """p-1-r warm-up forwards, then a forward and a backward in turn (arXiv 2006.09503).

    It is as fast as GPipe, but stashes at most p microbatches instead of m.

        p = 2, m = 3
        rank 0  F0 F1 .. B0 F2 B1 .. B2
        rank 1  .. F0 B0 F1 B1 F2 B2 ..
    """
    return warmed_up(r, m, p - 1 - r)


def eager_one_f_one_b(p: int, r: int, m: int) -> list[Instr]:
    """1F1B with twice the warm-up: a message may take a pass to arrive before a rank waits for it.

    p = 2, m = 3
    rank 0  F0 F1 F2 B0 .. B1 .. B2
    rank 1  .. F0 B0 F1 B1 F2 B2 ..
    """
    return warmed_up(r, m, 2 * (p - 1 - r))


def warmed_up(stage: int, m: int, warmup: int) -> list[Instr]:
    """`warmup` forwards, then F and B in turn while forwards are left, then the other B."""
    forwards = [Instr("F", stage, mb) for mb in range(m)]
    program = forwards[:warmup]
    for mb in range(m):
        program += forwards[warmup + mb : warmup + mb + 1]
        program.append(Instr("B", stage, mb))
    return program


class Family(NamedTuple):
    """How a schedule is made: the compute order of one rank, and the placement it is made for.

    order(p, r, m), or order(p, r, m, v, g) on the looped placement, where v is free.
    stages_per_rank: num_stages / p, the default of v. grouped: whether the order uses g. split:
    whether each backward is split into I and W.
    """

    order: Callable[..., list[Instr]]
    placement: str = "linear"
    stages_per_rank: int = 1
    grouped: bool = False
    split: bool = False

    @property
    def looped(self) -> bool:
        """Whether the number of chunks is free."""
        return self.placement == "looped"


FAMILIES = {
    "naive": Family(naive),
    "gpipe": Family(gpipe),
    "1f1b": Family(one_f_one_b),
    "eager-1f1b": Family(eager_one_f_one_b),
    "interleaved": Family(interleaved, "looped", 2, grouped=True),
    "looped-bfs": Family(looped_bfs, "looped", 2),
    "zb-h1": Family(zb_h1, split=True),
    "zb-h2": Family(zb_h2, split=True),
    "interleaved-zb": Family(interleaved_zb, "looped", 2, grouped=True, split=True),
    "zb-v": Family(zb_v, "v", 2, split=True),
    "v-half": Family(v_half, "v", 2, split=True),
    "v-min": Family(v_min, "v", 2, split=True),
    "dualpipe": Family(dualpipe, "mirror", 1),
    "dualpipe-v": Family(dualpipe_v, "v", 2),
}
SCHEDULES = tuple(FAMILIES)
MOST_RANKS = 1 << 12  # of a pipeline: the proof looks at every pair of neighbours
MOST_PASSES = 1 << 18  # forward passes of a step, which take some seconds to prove


def num_stages(name: str, pp_size: int, chunks: int | None = None) -> int:
    """Number of stages the model is cut into; only the looped placement uses `chunks`."""
    return pp_size * (chunks or FAMILIES[name].stages_per_rank)


def make_schedule(
    name: str,
    pp_size: int,
    num_microbatches: int,
    chunks: int | None = None,
    group_size: int | None = None,
) -> Schedule:
    """The schedule of that name; raises UsageError with every problem of these counts at once."""
    found = schedule_problems(name, pp_size, num_microbatches, chunks, group_size)
    if found:
        raise UsageError(found)
    family = FAMILIES[name]
    looped = (chunks or family.stages_per_rank, group_size) if family.looped else ()
    programs = tuple(
        with_reduce_grad(family.order(pp_size, pp_rank, num_microbatches, *looped))
        for pp_rank in range(pp_size)
    )
    stages = num_stages(name, pp_size, chunks)
    return Schedule(name, pp_size, stages, num_microbatches, family.placement, programs)


def with_reduce_grad(program: list[Instr]) -> tuple[Instr, ...]:
    """The program with REDUCE_GRAD(stage) right after the last backward (B or W) of each stage.

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
    group_size: int | None = None,
) -> list[str]:
    """Everything wrong with these counts for this schedule: the rule, and the next valid values."""
    if name not in FAMILIES:
        close, names = suggestion(name, SCHEDULES), ", ".join(SCHEDULES)
        return [f"--schedule {brief(name)} does not exist{close}; use one of {names}"]
    counts = {"--pp": pp_size, "--num-microbatches": num_microbatches}
    counts |= {"--chunks": chunks, "--group-size": group_size}
    found = [
        f"{flag} {brief(str(count))} must be at least 1"
        for flag, count in counts.items()
        if count is not None and count < 1
    ]
    if pp_size > MOST_RANKS:
        found.append(f"--pp {brief(str(pp_size))} must be at most {MOST_RANKS:,}")
    stages = pp_size * (chunks or FAMILIES[name].stages_per_rank)
    if not found and stages * num_microbatches > MOST_PASSES:
        found.append(
            f"--num-microbatches {brief(str(num_microbatches))} on {brief(str(stages))} stages: a"
            f" schedule has at most {MOST_PASSES:,} forward passes; use at most"
            f" --num-microbatches {max(1, MOST_PASSES // stages)}, or fewer stages"
        )
    if found:
        return found
    family = FAMILIES[name]
    if not family.looped and chunks not in (None, family.stages_per_rank):
        found.append(
            f"--schedule {name} cuts the model into {family.stages_per_rank} * pp stages, "
            f"not {chunks} * pp: leave --chunks out"
        )
    if group_size is not None and family.grouped:
        found += group_problems(name, pp_size, num_microbatches, group_size)
    elif group_size is not None:
        found.append(f"--schedule {name} has no groups: leave --group-size out")
    if name.startswith("dualpipe"):
        found += dualpipe_problems(name, pp_size, num_microbatches)
    return found


def group_problems(name: str, p: int, m: int, g: int) -> list[str]:
    """What is wrong with a group size.

    In a group shorter than p a rank would wait for a forward that it holds back itself.
    """
    if g >= m or (g >= p and (m % g == 0 or m % g >= p)):
        return []
    valid = [str(size) for size in range(p, m) if m % size == 0 or m % size >= p][:3]
    problem = (
        f"--schedule {name} needs groups of at least --pp {p} microbatches, the last one too; "
        f"--group-size {g} cuts {m} otherwise: use {', '.join([*valid, f'{m} or more'])}, "
        "or leave --group-size out"
    )
    return [problem]


def dualpipe_problems(name: str, p: int, m: int) -> list[str]:
    """What is wrong with the counts of DualPipe.

    Its step list needs two full streams, and the mirrored form two equal halves of them.
    """
    found = []
    even = 2 if name == "dualpipe" else 1
    if p % even:
        valid = f"{p - 1} or {p + 1}" if p > 1 else "2"
        found.append(f"--schedule {name} pairs the ranks up, --pp {p} is odd: use {valid}")
    if m < 2 * p or m % even:
        first = max(2 * p, m + m % even)
        rule = "an even number, " if even == 2 else ""
        found.append(
            f"--schedule {name} needs {rule}at least 2 * pp = {2 * p} microbatches, not {m}: "
            f"use --num-microbatches {first} or {first + even}"
        )
    return found
