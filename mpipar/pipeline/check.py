"""The proof that a schedule can run: order, complete gradients, matched messages, no deadlock.

The proof relies on three facts about the engine. A compute instruction waits for its own receives
and for no other message. Sends and receives never block by themselves. At the end every send is
matched. A synchronous send is complete once its receive is posted, which a rank does before it
waits for the data. A schedule can therefore hang only where ranks wait for each other's results in
a circle. Barriers inside a pass (over tp, cp or the data group) close none: their ranks run the
same program, and so meet in the same order.

First each program is proved on its own; `at` maps a part (kind, stage, mb) to its position in the
program. Then all programs run together, each until it waits for a message.
"""

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import Self

from mpipar.errors import UsageError
from mpipar.pipeline.instructions import (
    COMPUTE_KINDS,
    WIRE_KINDS,
    Instr,
    Message,
    Schedule,
    is_compute,
    neighbours,
    parts,
)
from mpipar.pipeline.lowering import lower
from mpipar.pipeline.placements import PLACEMENTS

NEEDED = {"B": "F", "I": "F", "W": "I"}  # the pass of the stage and microbatch that must run before
RIVAL = {"B": "I", "I": "B"}  # the two forms of a backward exclude each other
NEVER = inf  # the position of a missing part: after all others
Problems = Iterator[tuple[int, str]]  # position, and what is wrong there
Part = tuple[str, int, int]  # kind, stage, microbatch
Lane = tuple[int, int, str]  # source, target and direction of messages
Places = dict[Part, int]  # positions of parts in a program


class ScheduleError(UsageError):
    """A schedule that cannot run; the message names rank, position and instruction."""

    @classmethod
    def at(cls, schedule: Schedule, pp_rank: int, position: int, reason: str) -> Self:
        """Return the error for one position of a rank's program, or for its end."""
        program = schedule.programs[pp_rank]
        instr = program[position] if position < len(program) else "end of the program"
        return cls(
            f"schedule {schedule.name}: rank {pp_rank} position {position} ({instr}): {reason}"
        )


def check(schedule: Schedule) -> None:
    """Prove that the schedule can run, or raise ScheduleError at an instruction that cannot.

    Each (stage, mb) runs exactly one F and one B, or one F, one I and one W, all on its rank. No
    pass runs before what it needs. REDUCE_GRAD follows a stage's last backward. Each message has
    one send and one receive. No ranks wait for each other in a circle.
    """
    check_programs(schedule)
    deque(runnable_order(schedule), maxlen=0)


def check_programs(schedule: Schedule) -> None:
    """Prove each rank's program on its own: everything except that no ranks wait in a circle.

    `runnable_order` proves that, and yields the order.
    """
    check_placement(schedule)
    for pp_rank in range(schedule.pp_size):
        for position, reason in program_problems(schedule, pp_rank):
            raise ScheduleError.at(schedule, pp_rank, position, reason)


def check_lanes(schedule: Schedule) -> None:
    """Raise ScheduleError unless both ends of each lane post its messages in the same order.

    A lane holds the messages of one direction between two ranks, which NCCL matches by their order.
    The catalog's schedules always pass, so this check is for schedules from a file.
    """
    posted: dict[str, dict[Lane, list[Message]]] = {"SEND": {}, "RECV": {}}
    for pp_rank in range(schedule.pp_size):
        for instr in lower(schedule, pp_rank):
            if instr.kind in WIRE_KINDS:
                taken, given = neighbours(schedule, instr)
                (message,) = taken + given
                lane = message.source, message.target, message.direction
                posted[instr.kind[:4]].setdefault(lane, []).append(message)
    for (source, target, _), messages in posted["SEND"].items():
        received = posted["RECV"][source, target, messages[0].direction]
        for one, other in zip(messages, received, strict=True):
            if one != other:
                raise ScheduleError(
                    f"schedule {schedule.name}: rank {source} runs {one.send} where rank {target}"
                    f" runs {other.receive}, and NCCL matches messages by their order: put both"
                    " into the same order, or set MPIPAR_NCCL=no to send by MPI"
                )


def check_placement(schedule: Schedule) -> None:
    """Raise ScheduleError unless stages, ranks and microbatches fit the placement."""
    p, stages, m = schedule.pp_size, schedule.num_stages, schedule.num_microbatches
    fits = p == len(schedule.programs) and m >= 1 and PLACEMENTS[schedule.placement].fits(p, stages)
    if not fits:
        raise ScheduleError(
            f"schedule {schedule.name}: {stages} stages, {m} microbatches and "
            f"{len(schedule.programs)} programs do not fit the {schedule.placement} placement on "
            f"{p} ranks"
        )


def program_problems(schedule: Schedule, pp_rank: int) -> Problems:
    """Yield what is wrong with one rank's program; later problems may follow from the first."""
    program, held = schedule.programs[pp_rank], schedule.stages_by_rank[pp_rank]
    at: Places = {}
    if not program:
        yield 0, "this rank has nothing to do"
    for position, instr in enumerate(program):
        for part in parts(instr):
            if reason := misfit(schedule, held, part):
                yield position, reason
            if part in at:
                yield position, f"has already run at position {at[part]}"
            at[part] = position
    yield from order_problems(schedule, at)
    for reason in missing_parts(schedule, pp_rank, at):
        yield len(program), f"{reason} is missing"
    yield from reduce_problems(at)


def misfit(schedule: Schedule, held: tuple[int, ...], part: Part) -> str | None:
    """Return why a part does not belong on this rank; None if it does."""
    kind, stage, mb = part
    if kind not in COMPUTE_KINDS and kind != "REDUCE_GRAD":
        return "only F B I W OVERLAP_F_B REDUCE_GRAD may appear in this program"
    if stage not in held:
        return f"stage {stage} is not on this rank, which holds {list(held)}"
    if kind != "REDUCE_GRAD" and not 0 <= mb < schedule.num_microbatches:
        return f"microbatch {mb} does not exist, there are {schedule.num_microbatches}"
    return None


def order_problems(schedule: Schedule, at: Places) -> Problems:
    """Yield passes that come before what they need from this rank, including other stages."""
    for (kind, stage, mb), position in at.items():
        needed = {}  # what: its position
        if kind in NEEDED:
            needed[f"{stage}{NEEDED[kind]}{mb}"] = at.get((NEEDED[kind], stage, mb), NEVER)
        for message in neighbours(schedule, Instr(kind, stage, mb))[0]:
            if message.is_remote or kind not in COMPUTE_KINDS:
                continue
            source = message.from_stage
            if message.direction == "F":
                needed[f"{source}F{mb}"] = at.get(("F", source, mb), NEVER)
            else:
                needed[f"the backward of {source}F{mb}"] = min(
                    at.get((half, source, mb), NEVER) for half in "BI"
                )
        for what, where in needed.items():
            if where >= position:
                yield (
                    position,
                    f"needs {what}, which "
                    + ("this rank never runs" if where == NEVER else f"stands at {where}"),
                )
        rival = at.get((RIVAL.get(kind, ""), stage, mb), NEVER)
        if rival < position:
            yield position, f"the other form of this backward has run at position {rival}"


def missing_parts(schedule: Schedule, pp_rank: int, at: Places) -> Iterator[str]:
    """Yield the passes and gradient reductions of this rank that its program lacks."""
    for stage in schedule.stages_by_rank[pp_rank]:
        for mb in range(schedule.num_microbatches):
            forward, full, inputs, weight = ((kind, stage, mb) in at for kind in "FBIW")
            if not forward:
                yield f"{stage}F{mb}"
            if not full and not inputs:
                yield f"{stage}B{mb} (or {stage}I{mb} and {stage}W{mb})"
            if inputs and not weight:
                yield f"{stage}W{mb}"
        if ("REDUCE_GRAD", stage, -1) not in at:
            yield f"{stage}REDUCE_GRAD"


def reduce_problems(at: Places) -> Problems:
    """Yield reductions of a stage's gradients that come before its last backward."""
    for (kind, stage, _), position in at.items():
        if kind in ("B", "W") and position > (reduced := at["REDUCE_GRAD", stage, -1]):
            yield reduced, f"stage {stage} has a backward at position {position}"


def runnable_order(
    schedule: Schedule,
) -> Iterator[tuple[int, Instr, list[Message], list[Message]]]:
    """Yield (rank, instruction, received, sent) in an order in which all instructions can run.

    received, sent: messages between ranks that it waits for, and that leave after it. Only waiting
    for a message blocks, so the outcome does not depend on the order in which ranks are run: either
    all programs end, or ScheduleError names the circle of ranks that wait for each other.
    """
    programs = [iter(program) for program in schedule.programs]
    following = [next(program, None) for program in programs]  # what each rank runs next
    posted: set[Message] = set()  # and not yet taken
    waiting: dict[Message, int] = {}  # the rank that waits for it
    runnable = deque(range(schedule.pp_size))
    while runnable:
        pp_rank = runnable.popleft()
        while (instr := following[pp_rank]) is not None:
            received, sent = (
                [message for message in messages if message.is_remote]
                for messages in neighbours(schedule, instr)
            )
            missing = [message for message in received if message not in posted]
            if missing:
                waiting[missing[0]] = pp_rank
                break
            yield pp_rank, instr, received, sent
            following[pp_rank] = next(programs[pp_rank], None)
            posted.difference_update(received)
            posted.update(sent)
            runnable.extend(waiting.pop(message) for message in sent if message in waiting)
    if waiting:
        raise ScheduleError(circle(schedule, waiting))


def circle(schedule: Schedule, waiting: dict[Message, int]) -> str:
    """Return one line for each rank of a circle in which every rank waits for the next one."""
    awaited = {pp_rank: message for message, pp_rank in waiting.items()}
    path = [next(iter(awaited))]
    while (peer := awaited[path[-1]].source) not in path:
        path.append(peer)
    lines = [f"schedule {schedule.name}: deadlock, these ranks wait for each other in a circle:"]
    for pp_rank in path[path.index(peer) :]:
        message = awaited[pp_rank]
        lines.append(
            f"  {pass_of(schedule, pp_rank, message)} waits for "
            f"{pass_of(schedule, message.source, message)}"
        )
    return "\n".join(lines)


def pass_of(schedule: Schedule, pp_rank: int, message: Message) -> str:
    """Return, as text, the pass of a rank that needs or produces the message."""
    return next(
        f"rank {pp_rank} position {position} ({instr})"
        for position, instr in enumerate(schedule.programs[pp_rank])
        if is_compute(instr) and any(message in each for each in neighbours(schedule, instr))
    )
