"""A rank's program as columns of numbers: a million instructions are checked in a second."""

from collections.abc import Callable
from itertools import repeat

import numpy as np

from mpipar.pipeline.instructions import Schedule, ScheduleError

KINDS = ("F", "B", "I", "W", "OVERLAP_F_B", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
FORWARD, FULL, INPUT, WEIGHT, OVERLAP, REDUCE, SEND_F, RECV_F, SEND_B, RECV_B = range(len(KINDS))
CODES = {kind: code for code, kind in enumerate(KINDS)}


def columns(schedule: Schedule, pp_rank: int) -> np.ndarray:
    """int64 (4, n): position, kind's code (-1: unknown), stage, mb; an overlap is F, then B."""
    program = schedule.programs[pp_rank]
    if not program:
        raise ScheduleError.at(schedule, pp_rank, 0, "this rank has nothing to do")
    kinds, stages, mbs, *_ = zip(*program, strict=True)
    table = np.empty((4, len(program)), np.int64)
    table[0] = np.arange(len(program))
    table[1] = list(map(CODES.get, kinds, repeat(-1)))
    table[2], table[3] = stages, mbs
    overlaps = np.flatnonzero(table[1] == OVERLAP)
    if not overlaps.size:
        return table
    halves = [(position, FULL, *program[position][3:]) for position in overlaps]
    table[1, overlaps] = FORWARD
    return np.insert(table, overlaps + 1, np.transpose(halves), axis=1)


def refuse_first(
    schedule: Schedule,
    pp_rank: int,
    positions: np.ndarray,
    bad: np.ndarray,
    reason: Callable[[int], str],
) -> None:
    """Raise ScheduleError at the earliest position that is bad; reason(k) says why entry k is."""
    where = np.flatnonzero(bad)
    if where.size:
        k = where[np.argmin(positions[where])]
        raise ScheduleError.at(schedule, pp_rank, int(positions[k]), reason(k))
