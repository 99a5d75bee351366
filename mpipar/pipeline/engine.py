"""The engine: runs any schedule's program on one rank.

The program (see `lower`) is a list of instructions; the engine has one method per kind. Wire
instructions never block. RECV posts a receive into a new buffer. SEND posts a send and keeps the
array alive until the send is done. A compute instruction waits for its own receive and for nothing
else. The checker proves this rule free of deadlock, even when every send is synchronous.

A stage tells the engine when it enters and leaves one of its units (see `LayerRun`). There messages
progress, and there the sum of a unit's gradients starts as soon as they are complete.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter_ns

from mpipar.layers.stash import Stash
from mpipar.pipeline.instructions import Instr, Schedule, neighbours, parts

# Messages that travel up belong to forward, those that travel down to input gradients.
PHASE_OF = {"F": "F", "B": "I"}
FORWARD_ONLY = "eval"  # the phase, and the kind of the spans, of passes without a backward
NAME_OF = {"F": "activations", "B": "gradients"}


def forward_only(schedule: Schedule, mbs) -> Schedule:
    """The forward passes of a schedule on some of its microbatches, in its order.

    Evaluation and generation run them.
    """
    programs = tuple(
        tuple(instr._replace(kind="F", stage_b=-1, mb_b=-1) for instr in program
              if instr.kind in ("F", "OVERLAP_F_B") and instr.mb in mbs)
        for program in schedule.programs)
    return replace(schedule, programs=programs, wired=False)


def last_backwards(program) -> set[Instr]:
    """The last B or W of each stage of a program, which completes the stage's gradients."""
    last = {}
    for instr in program:
        for kind, stage, mb in parts(instr):
            if kind in ("B", "W"):
                last[stage] = Instr(kind, stage, mb)
    return set(last.values())


class Engine:
    """Executes programs over the stages that this rank holds.

    stages: {stage: Stage}. schedule: gives rank_of(stage, mb). comm: the pipeline group. gradsync:
    it is told when the gradients of a unit, or of a stage, are complete on this rank. weights: told
    when a pass enters and leaves a unit, see `layers/units.py`.
    """

    def __init__(self, ops, stages, schedule, comm, recorder, gradsync, weights):
        self.ops, self.stages, self.schedule = ops, stages, schedule
        self.comm, self.recorder, self.gradsync = comm, recorder, gradsync
        self.weights = weights
        self.last_stage = schedule.num_stages - 1
        if comm.size > 1:
            highest = self._tag("B", self.last_stage, schedule.num_microbatches)
            assert highest <= comm.max_tag(), (highest, comm.max_tag())

    def run(self, program, get_batch, training=True, caches=None):
        """Run one program; return the last stage's outputs by microbatch, {} where it is elsewhere.

        get_batch(mb) gives the rows of a microbatch. With training=False nothing is kept for a
        backward, and all is recorded as phase "eval". caches: (stage, mb) -> what keeps keys and
        values, while text is generated.
        Comm: the program's sends and receives over pp, and the layers' barriers over tp.
        """
        self.get_batch, self.training, self.caches = get_batch, training, caches or {}
        self.forward = "F" if training else FORWARD_ONLY
        self.stashes, self.inbox, self.outbox = {}, {}, {}
        self.sending, self.outputs, self.batches = [], {}, {}
        self.passing, self.last_passes = None, last_backwards(program)
        for instr in program:
            self.recorder.stage, self.recorder.mb = instr.stage, instr.mb
            getattr(self, f"_{instr.kind.lower()}")(instr)
            self._progress()
        for send in self.sending:
            send.wait()
        self.sending = []
        left = [*self.stashes, *self.inbox, *self.outbox]
        assert not left, f"the program ended with {left} unused"
        return self.outputs

    def enter(self, unit):
        """Called by a stage before a pass of one of its units, between two layers."""
        self._progress()
        self.weights.enter(self.passing, unit)
        if self.passing.kind in ("B", "W"):
            self.gradsync.begin_unit(self.passing.stage, unit)

    def leave(self, unit):
        """Called by a stage after a pass of one of its units.

        After a stage's last backward (B or W), the gradients of the unit are complete.
        """
        self.weights.leave(self.passing, unit)
        if self.passing.kind in ("B", "W"):
            self.gradsync.end_unit(self.passing.stage, unit, self.passing in self.last_passes)

    def _progress(self):
        """Let messages move: MPI may do that only while it is called.

        A device's copies to the host are handed to MPI here. Finished sends free their arrays.
        """
        self.sending = [send for send in self.sending if not send.test()]
        for receive in self.inbox.values():
            receive.test()
        self.gradsync.test()

    def _batch(self, mb):
        """The rows of a microbatch; reading them is a span of its own."""
        if mb not in self.batches:
            start = perf_counter_ns()
            self.batches[mb] = self.get_batch(mb)
            self.recorder.span("data", start, self.recorder.stage, mb)
        return self.batches[mb]

    def _tag(self, direction, stage, mb):
        """A unique tag for each message: of two ranks, next and previous are the same neighbour."""
        return (stage * self.schedule.num_microbatches + mb) * 2 + (direction == "B")

    # Wire instructions. inbox: pending receives by message. outbox: arrays by message that were
    # made here and are not yet taken or sent.

    def _recv_f(self, instr):
        self._receive(instr)

    def _recv_b(self, instr):
        self._receive(instr)

    def _send_f(self, instr):
        self._send(instr)

    def _send_b(self, instr):
        self._send(instr)

    def _receive(self, instr):
        """Post the receive of a stage's input, into a buffer that then belongs to the stage."""
        (message,), _ = neighbours(self.schedule, instr)
        self.recorder.enter(PHASE_OF[message.direction] if self.training else FORWARD_ONLY)
        shape = self.stages[message.stage].in_shape(self._batch(message.mb))
        buffer = self.ops.empty(shape, label="buffers")
        self.inbox[message] = self.comm.irecv(
            buffer, message.source, self._tag(*message[:3]), NAME_OF[message.direction])

    def _send(self, instr):
        """Post the send of a stage's result."""
        _, (message,) = neighbours(self.schedule, instr)
        self.recorder.enter(PHASE_OF[message.direction] if self.training else FORWARD_ONLY)
        self.sending.append(self.comm.isend(
            self.outbox.pop(message), message.target, self._tag(*message[:3]),
            NAME_OF[message.direction]))

    def _take(self, instr):
        """A stage's input, received or left by a stage of this rank; None at the model's ends."""
        for message in neighbours(self.schedule, instr)[0]:
            if message.is_remote:
                return self.inbox.pop(message).wait()
            return self.outbox.pop(message)
        return None

    def _give(self, instr, x):
        """Leave a pass's result for its send, or for another stage of this rank."""
        for message in neighbours(self.schedule, instr)[1]:
            self.outbox[message] = x

    # Compute instructions.

    def _f(self, instr):
        stage, mb = instr.stage, instr.mb
        x = self._take(instr)
        stash = Stash(self._batch(mb), self.caches.get((stage, mb)))
        self.recorder.enter(self.forward)
        start = self._begin(instr)
        y = self.stages[stage].forward(x, stash, self)
        self._span(self.forward, start, stage, mb)
        if self.training:
            self.stashes[stage, mb] = stash
        if stage == self.last_stage:
            self.outputs[mb] = y
        self._give(instr, y)

    def _b(self, instr):
        stage, mb = instr.stage, instr.mb
        dy = self._take(instr)
        start = self._begin(instr)
        dx = self.stages[stage].backward(dy, self.stashes.pop((stage, mb)), self)
        self._span("B", start, stage, mb)
        self._give(instr, dx)

    def _i(self, instr):
        stage, mb = instr.stage, instr.mb
        dy = self._take(instr)
        self.recorder.enter("I")
        start = self._begin(instr)
        dx = self.stages[stage].backward_input(dy, self.stashes[stage, mb], self)
        self._span("I", start, stage, mb)
        self._give(instr, dx)

    def _w(self, instr):
        self.recorder.enter("W")
        start = self._begin(instr)
        self.stages[instr.stage].backward_weight(self.stashes.pop((instr.stage, instr.mb)), self)
        self._span("W", start, instr.stage, instr.mb)

    def _overlap_f_b(self, instr):
        """F of one microbatch, then B of another: one process cannot overlap them."""
        forward, backward = (Instr(*part) for part in parts(instr))
        self._f(forward)
        self.recorder.stage, self.recorder.mb = backward.stage, backward.mb
        self._b(backward)

    def _unshard(self, instr):
        self.recorder.enter("F")
        self.weights.unshard(instr.stage)

    def _reshard(self, instr):
        self.weights.reshard(instr.stage)

    def _reduce_grad(self, instr):
        self.recorder.enter("sync")
        self.gradsync.start(instr.stage)

    def _begin(self, instr):
        """Note which pass runs now; return the instant."""
        self.passing = instr
        return perf_counter_ns()

    def _span(self, kind, start, stage, mb):
        self.ops.synchronize()  # a span ends when the device is done, not when the work is queued
        self.recorder.span(kind, start, stage, mb)
