"""The instructions of a schedule, and who sends what to whom.

The instructions are those of torch.distributed.pipelining, and so is their text form: 2F0 = stage
2, forward, microbatch 0.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpipar.pipeline.placements import PLACEMENTS

COMPUTE_KINDS = frozenset(("F", "B", "I", "W", "OVERLAP_F_B"))
WIRE_KINDS = frozenset(("SEND_F", "RECV_F", "SEND_B", "RECV_B"))


class Instr(NamedTuple):
    """One instruction of one rank; stage_b and mb_b belong to OVERLAP_F_B and are -1 elsewhere.

    F forward, B full backward, I input gradient, W weight gradient. OVERLAP_F_B: F(stage, mb), then
    B(stage_b, mb_b). REDUCE_GRAD: the stage's gradients are complete on this rank.
    UNSHARD, RESHARD: the stage's weights are gathered, and released.
    SEND_F (s, mb): output of stage s, to the rank of stage s+1. RECV_F (s, mb): input of stage s.
    SEND_B (s, mb): input gradient of s, to the rank of s-1. RECV_B (s, mb): output gradient of s.
    """

    kind: str
    stage: int
    mb: int = -1
    stage_b: int = -1
    mb_b: int = -1

    def __str__(self) -> str:
        if self.kind == "OVERLAP_F_B":
            return f"({self.stage}F{self.mb};{self.stage_b}B{self.mb_b})OVERLAP_F_B"
        return f"{self.stage}{self.kind}{self.mb if self.mb >= 0 else ''}"


def is_compute(instr: Instr) -> bool:
    """Return whether the instruction runs a pass of a stage, rather than moving or summing data."""
    return instr.kind in COMPUTE_KINDS


def parts(instr: Instr) -> tuple[tuple[str, int, int], ...]:
    """Return a compute instruction's passes (kind, stage, mb): two for OVERLAP_F_B, else one."""
    if instr.kind == "OVERLAP_F_B":
        return ("F", instr.stage, instr.mb), ("B", instr.stage_b, instr.mb_b)
    return ((instr.kind, instr.stage, instr.mb),)


@dataclass(frozen=True)
class Schedule:
    """One training step of a pipeline as a value: each pipeline rank's instructions in order.

    placement: which rank holds a stage, a row of PLACEMENTS.
    """

    name: str
    pp_size: int
    num_stages: int
    num_microbatches: int
    placement: str
    programs: tuple[tuple[Instr, ...], ...]

    @cached_property
    def stage_to_rank(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return PLACEMENTS[self.placement].stage_to_rank(self.pp_size, self.num_stages)

    @cached_property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages whose weights each rank holds, ascending."""
        held: list[list[int]] = [[] for _ in range(self.pp_size)]
        for stage, pp_rank in enumerate(self.stage_to_rank):
            held[pp_rank].append(stage)
        return tuple(map(tuple, held))


class Message(NamedTuple):
    """What a stage passes to its neighbour: an activation (direction F) or an input gradient (B).

    stage: the stage that takes it. source, target: the pipeline ranks that produce and need it. If
    both are the same rank, it stays there and nothing is sent.
    """

    direction: str
    stage: int
    mb: int
    source: int
    target: int

    @property
    def from_stage(self) -> int:
        """The stage that sends it."""
        return self.stage - 1 if self.direction == "F" else self.stage + 1

    @property
    def is_remote(self) -> bool:
        """Whether it goes to another rank."""
        return self.source != self.target

    @property
    def receive(self) -> Instr:
        """The instruction of the target that posts its receive."""
        return Instr(f"RECV_{self.direction}", self.stage, self.mb)

    @property
    def send(self) -> Instr:
        """The instruction of the source that posts its send."""
        return Instr(f"SEND_{self.direction}", self.from_stage, self.mb)


# By kind: the direction of its messages, whether it takes the one that enters its stage, and
# whether it gives the one that leaves it.
ENDS = {
    "F": ("F", True, True),
    "B": ("B", True, True),
    "I": ("B", True, True),
    "RECV_F": ("F", True, False),
    "SEND_F": ("F", False, True),
    "RECV_B": ("B", True, False),
    "SEND_B": ("B", False, True),
}


def neighbours(schedule: Schedule, instr: Instr) -> tuple[list[Message], list[Message]]:
    """Return the messages that instr takes and gives: the single rule of who sends what to whom.

    Activations go to the next stage, input gradients to the previous one. No message enters or
    leaves the model at its ends. A pass takes and gives, RECV only takes, SEND only gives, and all
    other instructions do neither.
    """
    taken, given = [], []
    for kind, stage, mb in parts(instr):
        if kind in ENDS:
            direction, takes, gives = ENDS[kind]
            step = 1 if direction == "F" else -1
            before, behind, last = stage - step, stage + step, schedule.num_stages - 1
            pp_rank = schedule.stage_to_rank
            if takes and 0 <= before <= last:
                taken.append(Message(direction, stage, mb, pp_rank[before], pp_rank[stage]))
            if gives and 0 <= behind <= last:
                given.append(Message(direction, behind, mb, pp_rank[stage], pp_rank[behind]))
    return taken, given
