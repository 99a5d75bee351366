"""The engine: runs any schedule's program on one rank.

The program is a list of instructions, and the engine has one method per kind. Wire instructions,
which `lowering.lower` adds, never block: RECV posts a receive into a new buffer, and SEND posts a
send and keeps the array alive until the send is done. A compute instruction waits for its own
receive and for no other message. `check.py` proves that this rule is free of deadlock, even if
every send is synchronous.

A stage tells the engine when it enters and leaves one of its units (see `PipelineStage`). At these
points messages progress, and the sum of a unit's gradients starts as soon as they are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

from mpipar.layers.stash import Stash
from mpipar.pipeline.check import check_lanes
from mpipar.pipeline.instructions import Instr, Message, Schedule, neighbours, parts
from mpipar.pipeline.lowering import forward_only

if TYPE_CHECKING:
    from mpipar.comm.group import Comm, Pending
    from mpipar.comm.recorder import Recorder
    from mpipar.layers.parallel.kv_cache import KVCache
    from mpipar.layers.stash import Batch
    from mpipar.models.stage import PipelineStage
    from mpipar.ops.functions import Ops
    from mpipar.ops.signature import Array

Key = tuple[int, int]  # stage, microbatch

FORWARD_ONLY = "eval"  # the phase, and the kind of the spans, of passes without a backward
NAME_OF = {"F": "activations", "B": "gradients"}


def last_backwards(program: Sequence[Instr]) -> set[Instr]:
    """Return the last B or W of each stage of a program, which completes the stage's gradients."""
    last = {}
    for instr in program:
        for kind, stage, mb in parts(instr):
            if kind in ("B", "W"):
                last[stage] = Instr(kind, stage, mb)
    return set(last.values())


class Gradients(Protocol):
    """What sums gradients over ranks, such as `train.gradsync.GradSync`."""

    def begin_unit(self, stage: int, unit: int) -> None: ...
    def end_unit(self, stage: int, unit: int, last: bool) -> None: ...
    def start(self, stage: int) -> None: ...
    def test(self) -> None: ...


class WholeWeights:
    """Weights that every rank holds whole; `train.zero.FullyShardedUnits` gathers them instead."""

    def enter(self, passing: Instr, unit: int) -> None: ...
    def leave(self, passing: Instr, unit: int) -> None: ...
    def unshard(self, stage: int) -> None: ...
    def reshard(self, stage: int) -> None: ...


class Engine:
    """Executes programs over the stages that this rank holds.

    stages: {stage: PipelineStage}. comm: the pipeline group. gradsync: is told when the gradients
    of a unit, or of a stage, are complete on this rank. weights: is told when a pass enters and
    leaves a unit, see `train/zero.py`.
    """

    def __init__(
        self,
        ops: Ops,
        stages: Mapping[int, PipelineStage],
        schedule: Schedule,
        comm: Comm,
        recorder: Recorder,
        gradsync: Gradients,
        weights: WholeWeights,
    ):
        self.ops, self.stages, self.schedule = ops, stages, schedule
        self.comm, self.recorder, self.gradsync = comm, recorder, gradsync
        self.weights = weights
        self.last_stage = schedule.num_stages - 1
        if comm.size > 1:
            highest = self._tag("B", self.last_stage, schedule.num_microbatches)
            assert highest <= comm.max_tag(), (highest, comm.max_tag())
        if comm.transport.in_order:
            for one in (schedule, forward_only(schedule, range(schedule.num_microbatches))):
                check_lanes(one)

    def run(
        self,
        program: Sequence[Instr],
        get_batch: Callable[[int], Batch],
        training: bool = True,
        caches: dict[Key, KVCache] | None = None,
    ) -> dict[int, Array]:
        """Run one program; return the last stage's outputs by microbatch, {} on other ranks.

        get_batch(mb) returns the rows of a microbatch. With training=False nothing is kept for a
        backward, and everything is recorded as phase "eval". caches: (stage, mb) -> the cache of
        keys and values, during text generation.
        Comm: the program's sends and receives over pp, and the layers' barriers.
        """
        self.get_batch, self.training, self.caches = get_batch, training, caches or {}
        self.forward = "F" if training else FORWARD_ONLY
        self.stashes: dict[Key, Stash] = {}
        self.inbox: dict[Message, Pending] = {}  # pending receives
        self.outbox: dict[Message, Array] = {}  # produced here, and not yet taken or sent
        self.sending: list[Pending] = []
        self.outputs: dict[int, Array] = {}
        self.batches: dict[int, Batch] = {}
        self.last_passes = last_backwards(program)
        # What runs an instruction, by kind, and in which phase. Messages to the next stage belong
        # to forward, those to the previous stage to input gradients. A whole backward begins with
        # its I.
        actions: dict[str, tuple[Callable[[Instr], None], str]] = {
            "F": (self._forward, self.forward),
            "B": (self._backward, "I"),
            "I": (self._backward_input, "I"),
            "W": (self._backward_weight, "W"),
            "OVERLAP_F_B": (self._overlapped, "F"),
            "RECV_F": (self._receive, self.forward),
            "SEND_F": (self._send, self.forward),
            "RECV_B": (self._receive, "I"),
            "SEND_B": (self._send, "I"),
            "UNSHARD": (lambda instr: self.weights.unshard(instr.stage), self.forward),
            "RESHARD": (lambda instr: self.weights.reshard(instr.stage), self.forward),
            # posts the sums that the last pass of a unit (`leave`) has not posted
            "REDUCE_GRAD": (lambda instr: self.gradsync.start(instr.stage), "sync"),
        }
        for instr in program:
            action, phase = actions[instr.kind]
            with self.recorder.at(phase, instr.stage, instr.mb):
                action(instr)
                self._progress()
        for send in self.sending:
            send.wait()
        self.sending = []
        left = [*self.stashes, *self.inbox, *self.outbox]
        assert not left, f"the program ended with {left} unused"
        return self.outputs

    def enter(self, unit: int) -> None:
        """Prepare a pass of a unit; a stage calls this before it, between two layers."""
        self._progress()
        self.weights.enter(self.passing, unit)
        if self.passing.kind in ("B", "W"):
            self.gradsync.begin_unit(self.passing.stage, unit)

    def leave(self, unit: int) -> None:
        """Finish a pass of a unit; a stage calls this after it.

        After a stage's last backward (B or W), the gradients of the unit are complete.
        """
        self.weights.leave(self.passing, unit)
        if self.passing.kind in ("B", "W"):
            self.gradsync.end_unit(self.passing.stage, unit, self.passing in self.last_passes)

    def _progress(self) -> None:
        """Let messages progress: MPI may do that only while it is called.

        A device's copies to the host are handed to MPI here. Finished sends free their arrays.
        """
        self.sending = [send for send in self.sending if not send.test()]
        for receive in self.inbox.values():
            receive.test()
        self.gradsync.test()

    def _batch(self, mb: int) -> Batch:
        """Return the rows of a microbatch; reading them is recorded as a span of its own."""
        if mb not in self.batches:
            start = perf_counter_ns()
            self.batches[mb] = self.get_batch(mb)
            self.recorder.span("data", start, self.recorder.stage, mb)
        return self.batches[mb]

    def _tag(self, direction: str, stage: int, mb: int) -> int:
        """Return a unique tag: of two ranks, each is the other's next and previous neighbour."""
        return (stage * self.schedule.num_microbatches + mb) * 2 + (direction == "B")

    # Wire instructions.

    def _receive(self, instr: Instr) -> None:
        """Post the receive of a stage's input, into a buffer that then belongs to the stage."""
        (message,), _ = neighbours(self.schedule, instr)
        shape = self.stages[message.stage].in_shape(self._batch(message.mb))
        buffer = self.ops.empty(shape, label="buffers")
        self.inbox[message] = self.comm.irecv(
            buffer, message.source, self._tag(*message[:3]), NAME_OF[message.direction]
        )

    def _send(self, instr: Instr) -> None:
        """Post the send of a stage's result."""
        _, (message,) = neighbours(self.schedule, instr)
        self.sending.append(
            self.comm.isend(
                self.outbox.pop(message),
                message.target,
                self._tag(*message[:3]),
                NAME_OF[message.direction],
            )
        )

    def _take(self, instr: Instr) -> Array:
        """Return a stage's input, received or from a stage here; None at the model's ends."""
        for message in neighbours(self.schedule, instr)[0]:
            if message.is_remote:
                return self.inbox.pop(message).wait()
            return self.outbox.pop(message)
        return None  # type: ignore[return-value]

    def _give(self, instr: Instr, x: Array) -> None:
        """Leave a pass's result for its send, or for another stage of this rank."""
        for message in neighbours(self.schedule, instr)[1]:
            self.outbox[message] = x

    # Compute instructions.

    def _forward(self, instr: Instr) -> None:
        stage, mb = instr.stage, instr.mb
        x = self._take(instr)
        stash = Stash(self._batch(mb), self.caches.get((stage, mb)))
        start = self._begin(instr)
        y = self.stages[stage].forward(x, stash, self)
        self._span(self.forward, start, stage, mb)
        if self.training:
            self.stashes[stage, mb] = stash
        if stage == self.last_stage:
            self.outputs[mb] = y
        self._give(instr, y)

    def _backward(self, instr: Instr) -> None:
        stage, mb = instr.stage, instr.mb
        dy = self._take(instr)
        start = self._begin(instr)
        dx = self.stages[stage].backward(dy, self.stashes.pop((stage, mb)), self)
        self._span("B", start, stage, mb)
        self._give(instr, dx)

    def _backward_input(self, instr: Instr) -> None:
        stage, mb = instr.stage, instr.mb
        dy = self._take(instr)
        start = self._begin(instr)
        dx = self.stages[stage].backward_input(dy, self.stashes[stage, mb], self)
        self._span("I", start, stage, mb)
        self._give(instr, dx)

    def _backward_weight(self, instr: Instr) -> None:
        start = self._begin(instr)
        self.stages[instr.stage].backward_weight(self.stashes.pop((instr.stage, instr.mb)), self)
        self._span("W", start, instr.stage, instr.mb)

    def _overlapped(self, instr: Instr) -> None:
        """Run F of one microbatch, then B of another: one process cannot overlap them."""
        forward, backward = (Instr(*part) for part in parts(instr))
        self._forward(forward)
        with self.recorder.at("I", backward.stage, backward.mb):
            self._backward(backward)

    def _begin(self, instr: Instr) -> Any:
        """Note which pass is running; return the current instant."""
        self.passing = instr
        return self.ops.timestamp()

    def _span(self, kind: str, start: Any, stage: int, mb: int) -> None:
        # A span ends when the device is done, not when the work has been queued.
        self.recorder.span(kind, start, stage, mb, self.ops.timestamp())
