"""The proof that a schedule can run: order, stash, complete gradients, matched messages, no hang.

What is assumed of the engine: a compute instruction waits for its own receives and for nothing
else; sends and receives never block by themselves; at the end every send is matched. A synchronous
send is complete once its receive is posted, which a rank does before it waits for the data. So a
schedule can hang only where ranks wait for each other's results in a circle (progress.py).

A rank's program is checked as columns of numbers, because a million instructions are checked in
front of a training run. NEVER, the position of what does not happen, is behind all positions.
"""

from dataclasses import dataclass

import numpy as np

from mpipar.pipeline.instructions import Schedule, ScheduleError, is_remote
from mpipar.pipeline.progress import message_events, prove_progress

KINDS = ("F", "B", "I", "W", "OVERLAP_F_B", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
FORWARD, FULL, INPUT, WEIGHT, OVERLAP, REDUCE, *WIRES = range(len(KINDS))
CODES = {kind: code for code, kind in enumerate(KINDS)}
STASH_CHANGE = np.array([1, -1, 0, -1])  # by F, B, I, W: a stash lives until its last reader
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class CheckReport:
    """What the proof found, by pipeline rank.

    peak_stash: most chunk-activations held at once, each from its F until its B or W.
    messages: point-to-point messages sent in one step.
    """

    peak_stash: tuple[int, ...]
    messages: tuple[int, ...]


def check(schedule: Schedule) -> CheckReport:
    """Prove that the schedule can run, or raise ScheduleError at an instruction that cannot.

    Each (stage, mb) runs exactly one F and one B, or one F, one I and one W, all on its rank;
    nothing runs before what it needs; REDUCE_GRAD follows a stage's last backward; each message
    has one send and one receive; no ranks wait for each other in a circle.
    """
    check_shape(schedule)
    peaks, events = [], []
    for pp_rank in range(schedule.pp_size):
        table = columns(schedule, pp_rank)
        check_fits(schedule, pp_rank, table)
        passes = table[:, table[1] <= WEIGHT]
        check_order(schedule, pp_rank, passes)
        check_reduce(schedule, pp_rank, table)
        peaks.append(int(STASH_CHANGE[passes[1]].cumsum().max()))
        events.append(message_events(schedule, pp_rank, passes, table[:, table[1] > REDUCE]))
    prove_progress(schedule, events)
    return CheckReport(tuple(peaks), tuple(sum(key < 0 for key in keys) for keys in events))


def check_shape(schedule: Schedule) -> None:
    """The numbers of stages, ranks and microbatches fit the placement."""
    p, stages, m = schedule.pp_size, schedule.num_stages, schedule.num_microbatches
    fits = {
        "linear": stages == p,
        "looped": stages % p == 0,
        "v": stages == 2 * p,
        "mirror": stages == p and p % 2 == 0 and m % 2 == 0,
    }
    if len(schedule.programs) != p or m < 1 or not fits[schedule.placement]:
        raise ScheduleError(
            f"schedule {schedule.name}: {stages} stages, {m} microbatches and "
            f"{len(schedule.programs)} programs do not fit the {schedule.placement} placement on "
            f"{p} ranks"
        )


def columns(schedule: Schedule, pp_rank: int) -> np.ndarray:
    """The program as an int array (4, n): position, kind, stage, mb; an overlap is its F and its B."""
    program = schedule.programs[pp_rank]
    if not program:
        raise ScheduleError.at(schedule, pp_rank, 0, "this rank has nothing to do")
    kinds, stages, mbs, *_ = zip(*program, strict=True)
    table = np.empty((4, len(program)), np.int64)
    table[0] = np.arange(len(program))
    table[1] = [CODES.get(kind, -1) for kind in kinds]
    table[2], table[3] = stages, mbs
    overlaps = np.flatnonzero(table[1] == OVERLAP)
    if not overlaps.size:
        return table
    halves = [(position, FULL, *program[position][3:]) for position in overlaps]
    table[1, overlaps] = FORWARD
    return np.insert(table, overlaps + 1, np.transpose(halves), axis=1)


def refuse_first(schedule, pp_rank, positions, bad, reason) -> None:
    """Raise at the earliest position that is bad, if any; reason(k) words what entry k violates."""
    where = np.flatnonzero(bad)
    if where.size:
        k = where[np.argmin(positions[where])]
        position = min(int(positions[k]), len(schedule.programs[pp_rank]))
        raise ScheduleError.at(schedule, pp_rank, position, reason(k))


def check_fits(schedule: Schedule, pp_rank: int, table: np.ndarray) -> None:
    """Every instruction is known, and every pass belongs to this rank."""
    positions, codes, stages, mbs = table
    allowed = (codes >= 0) & (schedule.wired | (codes <= REDUCE))
    words = " ".join(KINDS if schedule.wired else KINDS[:WIRES[0]])
    refuse_first(schedule, pp_rank, positions, ~allowed, lambda k: f"it has only {words} here")
    held = schedule.stages_of(pp_rank)
    refuse_first(
        schedule, pp_rank, positions, ~np.isin(stages, held),
        lambda k: f"stage {stages[k]} is not on this rank, which holds {held}",
    )
    m = schedule.num_microbatches
    refuse_first(
        schedule, pp_rank, positions, (codes != REDUCE) & ((mbs < 0) | (mbs >= m)),
        lambda k: f"microbatch {mbs[k]} does not exist, there are {m}",
    )
    if schedule.placement == "mirror":
        home = np.where(2 * mbs < m, stages, schedule.pp_size - 1 - stages)
        refuse_first(
            schedule, pp_rank, positions, (codes != REDUCE) & (home != pp_rank),
            lambda k: f"microbatch {mbs[k]} passes stage {stages[k]} on rank {home[k]}",
        )
