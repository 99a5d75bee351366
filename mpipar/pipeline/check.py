"""The proof that a schedule can run: order, stash, complete gradients, matched messages, no deadlock.

What is assumed of the engine: a compute instruction waits for its own receives and for nothing
else; sends and receives never block by themselves; at the end every send is matched. A synchronous
send is complete once its receive is posted, which a rank does before it waits for the data. So a
schedule can hang only where ranks wait for each other's results in a circle (progress.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

from mpipar.pipeline.instructions import Instr, Schedule, ScheduleError, is_remote, parts
from mpipar.pipeline.progress import WIRE_KINDS, prove_progress, wired_events

# State of a (stage, mb) on its rank; ELSEWHERE: another rank handles it (mirror placement).
UNTOUCHED, STASHED, INPUT_DONE, FINISHED, ELSEWHERE = range(5)
# What a pass finds and what it leaves.
STEPS = {
    "F": (UNTOUCHED, STASHED),
    "B": (STASHED, FINISHED),
    "I": (STASHED, INPUT_DONE),
    "W": (INPUT_DONE, FINISHED),
}


@dataclass(frozen=True)
class CheckReport:
    """What the proof found, by pipeline rank.

    peak_stash: most chunk-activations held at once, each from its F until its B or W.
    messages: point-to-point messages sent in one step.
    """

    peak_stash: tuple[int, ...]
    messages: tuple[int, ...]


class Link(NamedTuple):
    """What the passes of one kind on one stage touch.

    row: state by microbatch, which goes from before to after. source: row of the producer on the
    same rank, where the state has to be at least `least`; None if there is none. wait, post: key of
    the message received or sent for microbatch 0, -1 for none.
    """

    row: bytearray
    before: int
    after: int
    source: bytearray | None
    least: int
    wait: int
    post: int


def check(schedule: Schedule) -> CheckReport:
    """Prove that the schedule can run, or raise ScheduleError at the first instruction that cannot.

    Each (stage, mb) runs exactly one F and one B, or one F, one I and one W, all on its rank;
    nothing runs before what it needs; REDUCE_GRAD follows a stage's last backward; each message
    has one send and one receive; no ranks wait for each other in a circle.
    """
    check_shape(schedule)
    ranks = range(schedule.pp_size)
    walks = [walk_rank(schedule, pp_rank) for pp_rank in ranks]
    events = [events for _, events in walks]
    if schedule.wired:
        events = [wired_events(schedule, pp_rank) for pp_rank in ranks]
    prove_progress(schedule, events)
    return CheckReport(
        peak_stash=tuple(peak for peak, _ in walks),
        messages=tuple(sum(key < 0 for key in keys) for keys in events),
    )


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


def walk_rank(schedule: Schedule, pp_rank: int) -> tuple[int, list[int]]:
    """Peak stash of one rank and its events (see progress.py); all that one rank alone can show.

    The time of a check is spent here, under a microsecond for an instruction.
    """
    m = schedule.num_microbatches
    rows, links = tables(schedule, pp_rank)
    reduced, events = set(), []
    live = peak = 0
    for position, instr in enumerate(schedule.programs[pp_rank]):
        kind, stage, mb = instr[:3]
        if kind == "REDUCE_GRAD":
            check_reduce(schedule, pp_rank, position, rows, reduced)
            continue
        if kind in WIRE_KINDS and schedule.wired:
            continue
        before_instr = len(events)
        overlapped = kind == "OVERLAP_F_B"
        for kind, stage, mb in parts(instr) if overlapped else ((kind, stage, mb),):
            link = links.get((kind, stage))
            if link is None or not 0 <= mb < m:
                raise ScheduleError.at(schedule, pp_rank, position, misfit(schedule, pp_rank, instr))
            row, before, after, source, least, wait, post = link
            if row[mb] != before or (source is not None and source[mb] < least):
                reason = misstep(kind, stage, mb, link)
                raise ScheduleError.at(schedule, pp_rank, position, reason)
            row[mb] = after
            if after == STASHED:
                live += 1
                peak = max(peak, live)
            elif after == FINISHED:
                live -= 1
            if wait >= 0:
                events.append(wait + mb)
            if post >= 0:
                events.append(~(post + mb))
        if overlapped:
            # Both passes wait before either result leaves; F's own B cannot be the other half.
            events[before_instr:] = sorted(events[before_instr:], key=lambda key: key < 0)
            if instr[1:3] == instr[3:]:
                reason = "the two passes of an overlap cannot be one microbatch on one stage"
                raise ScheduleError.at(schedule, pp_rank, position, reason)
    check_complete(schedule, pp_rank, rows, reduced)
    return peak, events
