"""Who waits for whom: the part of the proof that looks at several ranks at once.

A rank becomes a list of events in program order: a key >= 0 waits for a message, ~key posts it.
The key of the message into (stage, mb) is stage * m + mb for an activation, and num_stages * m more
for a gradient. Waiting is all that can block, so any order of running the ranks ends the same way.
"""

from collections import deque

import numpy as np

from mpipar.pipeline.columns import (
    FORWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    WEIGHT,
    refuse_first,
)
from mpipar.pipeline.instructions import (
    Schedule,
    ScheduleError,
    is_compute,
    is_remote,
    parts,
)


def message_events(
    schedule: Schedule, pp_rank: int, passes: np.ndarray, wires: np.ndarray
) -> list[int]:
    """The events of a rank; passes and wires: its columns (position, code, stage, mb).

    The messages follow from the passes. A result is posted right behind its pass, or, where the
    schedule is wired, at its SEND, after its sends and receives have been matched with the passes.
    """
    posted_at, posts, waits_at, waits = messages(schedule, pp_rank, passes)
    if schedule.wired:
        match(schedule, pp_rank, wires, (RECV_F, RECV_B), waits, waits_at)
        match(schedule, pp_rank, wires, (SEND_F, SEND_B), posts, posted_at)
        positions, codes, _, _ = wires
        sends = (codes == SEND_F) | (codes == SEND_B)
        posted_at, posts = positions[sends], wire_keys(schedule, wires[:, sends])
    # At one position (an overlap) all waits come before the posts.
    order = np.argsort(np.concatenate((2 * waits_at, 2 * posted_at + 1)), kind="stable")
    return np.concatenate((waits, ~posts))[order].tolist()


def messages(
    schedule: Schedule, pp_rank: int, passes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions and keys of what the passes send, then positions and keys of what they receive."""
    m, stages_in_all = schedule.num_microbatches, schedule.num_stages
    positions, codes, stages, mbs = passes[:, passes[1] < WEIGHT]
    below, above = np.zeros((2, stages_in_all), bool)  # is that neighbour on another rank?
    for stage in schedule.stages_of(pp_rank):
        mb = next(mb for mb in (0, m - 1) if schedule.rank_of(stage, mb) == pp_rank)
        below[stage] = is_remote(schedule, pp_rank, stage - 1, mb)
        above[stage] = is_remote(schedule, pp_rank, stage + 1, mb)
    forward = codes == FORWARD
    into = np.where(forward, stages, stages_in_all + stages) * m + mbs
    out = np.where(forward, stages + 1, stages_in_all + stages - 1) * m + mbs
    received = np.where(forward, below[stages], above[stages])
    sent = np.where(forward, above[stages], below[stages])
    return positions[sent], out[sent], positions[received], into[received]


def wire_keys(schedule: Schedule, wires: np.ndarray) -> np.ndarray:
    """The keys of the messages that wire instructions send or receive."""
    _, codes, stages, mbs = wires
    into = stages + (codes == SEND_F) - (codes == SEND_B)
    gradient = (codes == SEND_B) | (codes == RECV_B)
    return (into + gradient * schedule.num_stages) * schedule.num_microbatches + mbs


def match(
    schedule: Schedule,
    pp_rank: int,
    wires: np.ndarray,
    codes: tuple[int, int],
    keys: np.ndarray,
    positions: np.ndarray,
) -> None:
    """Refuse what is wrong between a rank's receives (or sends) and the messages of its passes.

    keys, positions: the messages that the passes need (or make) and where. Each has one wire
    instruction; a receive is posted before its pass, a send stands behind it.
    """
    wires = wires[:, np.isin(wires[1], codes)]
    found, found_at = wire_keys(schedule, wires), wires[0]
    refuse_first(
        schedule, pp_rank, found_at, ~np.isin(found, keys),
        lambda k: "no pass of this rank has this message: wrong stage, microbatch or rank",
    )
    order = np.argsort(found, kind="stable")
    again = np.zeros(found.size, bool)
    again[order[1:]] = found[order[1:]] == found[order[:-1]]
    refuse_first(schedule, pp_rank, found_at, again, lambda k: "stands here a second time")
    receives = codes[0] == RECV_F
    word = "receive" if receives else "send"
    refuse_first(
        schedule, pp_rank, positions, ~np.isin(keys, found),
        lambda k: f"the {word} of its message is missing",
    )
    pass_at = positions[np.argsort(keys)][np.argsort(order)]
    refuse_first(
        schedule, pp_rank, found_at, (found_at > pass_at) if receives else (found_at < pass_at),
        lambda k: f"the {word} is on the wrong side of its pass at position {pass_at[k]}",
    )


def prove_progress(schedule: Schedule, events: list[list[int]]) -> None:
    """Run all events; raise ScheduleError with the circle of waiting ranks if some cannot run."""
    posted = bytearray(2 * schedule.num_stages * schedule.num_microbatches)
    reached = [0] * len(events)
    waiting = {}  # key: the rank that waits for it
    runnable = deque(range(len(events)))
    while runnable:
        pp_rank = runnable.popleft()
        keys = events[pp_rank]
        for k in range(reached[pp_rank], len(keys)):
            key = keys[k]
            if key < 0:
                posted[~key] = 1
                if ~key in waiting:
                    runnable.append(waiting.pop(~key))
            elif not posted[key]:
                waiting[key] = pp_rank
                reached[pp_rank] = k
                break
    if waiting:
        raise ScheduleError(describe_circle(schedule, waiting))


def describe_circle(schedule: Schedule, waiting: dict[int, int]) -> str:
    """A line for each rank of a circle in which every rank waits for a result of the next one."""
    m = schedule.num_microbatches
    awaited = {}  # by rank: (kinds, producing stage, consuming stage, mb)
    for key, pp_rank in waiting.items():
        stage, mb = divmod(key % (schedule.num_stages * m), m)
        gradient = key >= schedule.num_stages * m
        awaited[pp_rank] = ("BI", stage + 1, stage, mb) if gradient else ("F", stage - 1, stage, mb)
    path = [next(iter(awaited))]
    while True:
        _, source, _, mb = awaited[path[-1]]
        peer = schedule.rank_of(source, mb)
        if peer in path:
            break
        path.append(peer)
    lines = [f"schedule {schedule.name}: deadlock, these ranks wait for each other in a circle:"]
    for member in path[path.index(peer) :]:
        kinds, source, stage, mb = awaited[member]
        owner = schedule.rank_of(source, mb)
        lines.append(
            f"  rank {member} position {find_pass(schedule, member, kinds, stage, mb)} waits for "
            f"rank {owner} position {find_pass(schedule, owner, kinds, source, mb)}"
        )
    return "\n".join(lines)


def find_pass(schedule: Schedule, pp_rank: int, kinds: str, stage: int, mb: int) -> str:
    """Position and instruction of the rank's pass of one of these kinds on (stage, mb)."""
    return next(
        f"{position} ({instr})"
        for position, instr in enumerate(schedule.programs[pp_rank])
        if is_compute(instr)
        and any(part[0] in kinds and part[1:] == (stage, mb) for part in parts(instr))
    )
