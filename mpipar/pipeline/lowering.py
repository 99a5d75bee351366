"""The programs that the engine runs: a schedule with its sends, receives and gathers of weights."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from mpipar.pipeline.instructions import Instr, Schedule, is_compute, neighbours, parts


def receives(schedule: Schedule, instr: Instr) -> list[Instr]:
    """Return the receives that a pass waits for; none where the producer is on the same rank."""
    return [message.receive for message in neighbours(schedule, instr)[0] if message.is_remote]


def sends(schedule: Schedule, instr: Instr) -> list[Instr]:
    """Return the sends of a pass's result; none where the consumer is on the same rank."""
    return [message.send for message in neighbours(schedule, instr)[1] if message.is_remote]


def lower(schedule: Schedule, pp_rank: int) -> list[Instr]:
    """Return the program of pp_rank with wire instructions, which the engine runs.

    A receive is posted one compute instruction before the one that needs it, so that its data can
    arrive meanwhile. A send directly follows the pass that produces its data. Both are
    non-blocking: of messages, only a compute instruction waits, and only for its own receives. The
    peers' programs follow from the same rule, so nothing is negotiated at run time.
    """
    program = schedule.programs[pp_rank]
    ahead = iter([receives(schedule, instr) for instr in program if is_compute(instr)])
    lowered = list(next(ahead, []))
    for instr in program:
        if is_compute(instr):
            lowered += next(ahead, [])
        lowered.append(instr)
        lowered += sends(schedule, instr)
    return lowered


def with_weights_kept(program: Sequence[Instr]) -> list[Instr]:
    """Return a program that gathers each stage's weights once and releases them at the end.

    UNSHARD comes before a stage's first pass that reads weights and RESHARD after the last one. W
    reads none.
    """
    positions: dict[int, list[int]] = {}
    for position, instr in enumerate(program):
        for kind, stage, _ in parts(instr):
            if kind in ("F", "B", "I"):
                positions.setdefault(stage, []).append(position)
    found = []
    for position, instr in enumerate(program):
        found += [
            Instr("UNSHARD", stage) for stage, all_of in positions.items() if all_of[0] == position
        ]
        found.append(instr)
        found += [
            Instr("RESHARD", stage) for stage, all_of in positions.items() if all_of[-1] == position
        ]
    return found


def forward_only(schedule: Schedule, mbs: Collection[int]) -> Schedule:
    """Return the forward passes of a schedule on some of its microbatches, in its order.

    Evaluation and generation run them.
    """
    programs = tuple(
        tuple(
            instr._replace(kind="F", stage_b=-1, mb_b=-1)
            for instr in program
            if instr.kind in ("F", "OVERLAP_F_B") and instr.mb in mbs
        )
        for program in schedule.programs
    )
    return replace(schedule, programs=programs)
