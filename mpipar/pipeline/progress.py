"""Who waits for whom: the part of the proof that looks at several ranks at once.

A rank is a list of events in program order: a key >= 0 waits for a message, ~key posts it. The key
of the message into (stage, mb) is stage * m + mb for an activation and num_stages * m more for a
gradient. Waiting is all that can block, so any order of running the ranks finds the same end.
"""

from mpipar.pipeline.instructions import (
    WIRE_KINDS,
    Instr,
    Schedule,
    ScheduleError,
    is_compute,
    parts,
    receives,
    sends,
)


def message_key(schedule: Schedule, wire: Instr) -> int:
    """The key of the message that a wire instruction sends or receives."""
    m, kind = schedule.num_microbatches, wire.kind
    into = wire.stage + {"SEND_F": 1, "SEND_B": -1}.get(kind, 0)
    gradient = kind in ("SEND_B", "RECV_B")
    return (into + gradient * schedule.num_stages) * m + wire.mb


def wired_events(schedule: Schedule, pp_rank: int) -> list[int]:
    """The events of a rank that states its sends and receives, each checked against its passes.

    A receive has to be posted before the pass that needs it, a send stands behind its producer,
    and each message of the rank's passes has exactly one of them.
    """
    program = schedule.programs[pp_rank]
    consumer, producer = {}, {}
    for position, instr in enumerate(program):
        if is_compute(instr):
            consumer |= dict.fromkeys(receives(schedule, pp_rank, instr), position)
            producer |= dict.fromkeys(sends(schedule, pp_rank, instr), position)
    events, seen = [], set()
    for position, instr in enumerate(program):
        if is_compute(instr):
            for wire in receives(schedule, pp_rank, instr):
                if wire not in seen:
                    reason = f"its receive {wire} is missing, or posted later"
                    raise ScheduleError.at(schedule, pp_rank, position, reason)
                events.append(message_key(schedule, wire))
        elif instr.kind in WIRE_KINDS:
            check_wire(schedule, pp_rank, position, consumer, producer, seen)
            seen.add(instr)
            if instr in producer:
                events.append(~message_key(schedule, instr))
    for wire, position in producer.items():
        if wire not in seen:
            raise ScheduleError.at(schedule, pp_rank, position, f"its send {wire} is missing")
    return events


def check_wire(
    schedule: Schedule,
    pp_rank: int,
    position: int,
    consumer: dict[Instr, int],
    producer: dict[Instr, int],
    seen: set[Instr],
) -> None:
    """Refuse a wire instruction that has no pass, stands twice, or sends what is not there yet."""
    instr = schedule.programs[pp_rank][position]
    if instr in seen:
        raise ScheduleError.at(schedule, pp_rank, position, "stands here a second time")
    if instr not in consumer and instr not in producer:
        reason = "no pass of this rank makes or needs this message: wrong stage, microbatch or rank"
        raise ScheduleError.at(schedule, pp_rank, position, reason)
    if position < producer.get(instr, -1):
        reason = f"sends before {schedule.programs[pp_rank][producer[instr]]} has made the data"
        raise ScheduleError.at(schedule, pp_rank, position, reason)


def prove_progress(schedule: Schedule, events: list[list[int]]) -> None:
    """Run all events; raise ScheduleError with the circle of waiting ranks when not all can run."""
    posted = bytearray(2 * schedule.num_stages * schedule.num_microbatches)
    reached = [0] * len(events)
    waiting = {}  # key -> the rank that stands there
    runnable = list(range(len(events)))
    while runnable:
        pp_rank = runnable.pop()
        keys = events[pp_rank]
        for position in range(reached[pp_rank], len(keys)):
            key = keys[position]
            if key < 0:
                posted[~key] = 1
                if ~key in waiting:
                    runnable.append(waiting.pop(~key))
            elif not posted[key]:
                waiting[key] = pp_rank
                reached[pp_rank] = position
                break
    if waiting:
        raise ScheduleError(describe_circle(schedule, waiting))


def describe_circle(schedule: Schedule, waiting: dict[int, int]) -> str:
    """One line for each rank of a circle in which every rank waits for the next one's message."""
    m = schedule.num_microbatches
    stands_at = {pp_rank: key for key, pp_rank in waiting.items()}
    pp_rank = next(iter(stands_at))
    path = []
    while pp_rank not in path:
        path.append(pp_rank)
        gradient, rest = divmod(stands_at[pp_rank], schedule.num_stages * m)
        stage, mb = divmod(rest, m)
        pp_rank = schedule.rank_of(stage + (1 if gradient else -1), mb)
    lines = [f"schedule {schedule.name}: deadlock, these ranks wait for each other:"]
    for pp_rank in path[path.index(pp_rank) :]:
        gradient, rest = divmod(stands_at[pp_rank], schedule.num_stages * m)
        stage, mb = divmod(rest, m)
        kinds, source = (("B", "I"), stage + 1) if gradient else (("F",), stage - 1)
        position, instr = find_pass(schedule, pp_rank, kinds, stage, mb)
        peer = schedule.rank_of(source, mb)
        needed_at, needed = find_pass(schedule, peer, kinds, source, mb)
        lines.append(
            f"  rank {pp_rank} position {position} ({instr}) waits for rank {peer} "
            f"position {needed_at} ({needed})"
        )
    return "\n".join(lines)


def find_pass(
    schedule: Schedule, pp_rank: int, kinds: tuple[str, ...], stage: int, mb: int
) -> tuple[int, Instr]:
    """Position and instruction of a rank's pass of one of these kinds on (stage, mb)."""
    return next(
        (position, instr)
        for position, instr in enumerate(schedule.programs[pp_rank])
        if is_compute(instr)
        and any(part[0] in kinds and part[1:] == (stage, mb) for part in parts(instr))
    )
