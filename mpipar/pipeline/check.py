"""The proof that a schedule can run: order, stash, complete gradients, matched messages, no hang.

What is assumed of the engine: a compute instruction waits for its own receives and for nothing
else; sends and receives never block by themselves; at the end every send is matched. A synchronous
send is complete once its receive is posted, which a rank does before it waits for the data. So a
schedule can hang only where ranks wait for each other's results in a circle (progress.py).
"""

from dataclasses import dataclass

import numpy as np

from mpipar.pipeline.columns import (
    FORWARD,
    FULL,
    INPUT,
    KINDS,
    REDUCE,
    SEND_F,
    WEIGHT,
    columns,
    refuse_first,
)
from mpipar.pipeline.instructions import Schedule, ScheduleError
from mpipar.pipeline.progress import message_events, prove_progress

STASH_CHANGE = np.array([1, -1, 0, -1])  # by F, B, I, W: a stash lives until its last reader
NEEDED = np.array([FORWARD, FORWARD, FORWARD, INPUT])  # what B, I and W need of the same microbatch
RIVAL = np.array([FORWARD, INPUT, FULL, WEIGHT])  # B and I exclude each other
NEVER = np.iinfo(np.int64).max  # the position of what does not happen: behind all others


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


def check_fits(schedule: Schedule, pp_rank: int, table: np.ndarray) -> None:
    """Every instruction is known, and its stage and microbatch belong to this rank."""
    positions, codes, stages, mbs = table
    m, held = schedule.num_microbatches, schedule.stages_of(pp_rank)
    known = KINDS if schedule.wired else KINDS[:SEND_F]
    refuse_first(
        schedule, pp_rank, positions, (codes < 0) | (codes >= len(known)),
        lambda k: f"only {' '.join(known)} may stand in this program",
    )
    refuse_first(
        schedule, pp_rank, positions, ~np.isin(stages, held),
        lambda k: f"stage {stages[k]} is not on this rank, which holds {list(held)}",
    )
    of_mb = codes != REDUCE
    refuse_first(
        schedule, pp_rank, positions, of_mb & ((mbs < 0) | (mbs >= m)),
        lambda k: f"microbatch {mbs[k]} does not exist, there are {m}",
    )
    if schedule.placement == "mirror":
        home = np.where(2 * mbs < m, stages, schedule.pp_size - 1 - stages)
        refuse_first(
            schedule, pp_rank, positions, of_mb & (home != pp_rank),
            lambda k: f"microbatch {mbs[k]} passes stage {stages[k]} on rank {home[k]}",
        )


def check_order(schedule: Schedule, pp_rank: int, passes: np.ndarray) -> None:
    """Each pass runs once, behind what it needs of this rank, and none is missing."""
    positions, codes, stages, mbs = passes
    held = schedule.stages_of(pp_rank)
    slots = np.searchsorted(held, stages)
    at = np.full((WEIGHT + 1, len(held), schedule.num_microbatches), NEVER)
    cells = np.ravel_multi_index((codes, slots, mbs), at.shape)
    np.minimum.at(at.reshape(-1), cells, positions)
    first = at[codes, slots, mbs]
    refuse_first(
        schedule, pp_rank, positions, first != positions,
        lambda k: f"has already run at position {first[k]}",
    )
    needed = np.where(codes == FORWARD, -1, at[NEEDED[codes], slots, mbs])
    refuse_first(
        schedule, pp_rank, positions, needed >= positions,
        lambda k: f"needs {stages[k]}{KINDS[NEEDED[codes[k]]]}{mbs[k]}, {when(needed[k])}",
    )
    rival = np.where(RIVAL[codes] == codes, NEVER, at[RIVAL[codes], slots, mbs])
    refuse_first(
        schedule, pp_rank, positions, rival < positions,
        lambda k: f"the other form of this backward has run at position {rival[k]}",
    )
    check_neighbours(schedule, pp_rank, at)
    check_complete(schedule, pp_rank, at)


def when(position: int) -> str:
    """Words for where a pass stands that was needed earlier."""
    return "which this rank never runs" if position == NEVER else f"which stands at {position}"


def check_neighbours(schedule: Schedule, pp_rank: int, at: np.ndarray) -> None:
    """Where a rank hands data to itself, the producer stands before the consumer.

    at: positions (4 kinds, stages held, microbatches).
    """
    held = schedule.stages_of(pp_rank)
    backward = np.minimum(at[FULL], at[INPUT])
    for low, high in zip(range(len(held)), range(1, len(held)), strict=False):
        stage, above = held[low], held[high]
        if above != stage + 1 or schedule.placement == "mirror":
            continue
        for consumer, producer, source in (
            (at[FORWARD, high], at[FORWARD, low], f"{stage}F"),
            (backward[low], backward[high], f"the backward of {above}F"),
        ):
            refuse_first(
                schedule, pp_rank, consumer, (consumer != NEVER) & (producer >= consumer),
                lambda mb, source=source, at=producer: f"needs {source}{mb}, {when(at[mb])}",
            )


def check_complete(schedule: Schedule, pp_rank: int, at: np.ndarray) -> None:
    """No pass of this rank is missing; the position named is the end of the program."""
    end = len(schedule.programs[pp_rank])
    for slot, stage in enumerate(schedule.stages_of(pp_rank)):
        forward, full, inputs, weight = at[:, slot] == NEVER
        for words, missing in (
            ("{0}F{1}", forward),
            ("{0}B{1} (or {0}I{1} and {0}W{1})", full & inputs),
            ("{0}W{1}", ~inputs & weight),
        ):
            for mb in np.flatnonzero(missing):
                if schedule.rank_of(stage, mb) == pp_rank:
                    reason = f"{words.format(stage, mb)} is missing"
                    raise ScheduleError.at(schedule, pp_rank, end, reason)


def check_reduce(schedule: Schedule, pp_rank: int, table: np.ndarray) -> None:
    """One REDUCE_GRAD for each stage of the rank, behind the stage's last B or W."""
    positions, codes, stages, _ = table
    for stage in schedule.stages_of(pp_rank):
        here = stages == stage
        last = positions[here & ((codes == FULL) | (codes == WEIGHT))].max()
        reduces = positions[here & (codes == REDUCE)]
        if not reduces.size:
            end = len(schedule.programs[pp_rank])
            raise ScheduleError.at(schedule, pp_rank, end, f"{stage}REDUCE_GRAD is missing")
        refuse_first(
            schedule, pp_rank, reduces, reduces < last,
            lambda k, last=last: f"stage {stage} has a backward at position {last}",  # noqa: B023
        )
        refuse_first(
            schedule, pp_rank, reduces, np.arange(reduces.size) > 0,
            lambda k, first=reduces[0]: f"the stage's gradients were reduced at {first}",
        )
