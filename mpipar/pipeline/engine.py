"""The engine: runs any schedule's program on one rank.

The program (see `lower`) is a list of instructions; the engine is one method per kind. Wire
instructions never block: RECV posts a receive into a buffer of its own, SEND posts a send and keeps
the array alive until it is done. A compute instruction waits for its own receive, and for nothing
else; that rule is what the checker proves free of deadlock even when every send is synchronous.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter_ns

from mpipar.layers.stash import Stash
from mpipar.pipeline.instructions import Schedule

# What travels up belongs to forward, what travels down to input gradients.
PHASE_OF = {"F": "F", "B": "I"}


def forward_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The forward passes of a schedule on its first microbatches, in its order: to evaluate or
    generate.
    """
    programs = tuple(
        tuple(instr._replace(kind="F", stage_b=-1, mb_b=-1) for instr in program
              if instr.kind in ("F", "OVERLAP_F_B") and instr.mb < num_microbatches)
        for program in schedule.programs)
    return replace(schedule, programs=programs, wired=False)


class Engine:
    """Executes programs over the stages that this rank holds.

    stages: {stage: Stage}. schedule: gives rank_of(stage, mb). comm: the pipeline group.
    gradsync: told at REDUCE_GRAD that a stage's gradients are complete on this rank.
    """

    def __init__(self, ops, stages, schedule, comm, recorder, gradsync):
        self.ops, self.stages, self.schedule = ops, stages, schedule
        self.comm, self.recorder, self.gradsync = comm, recorder, gradsync
        self.last_stage = schedule.num_stages - 1
        if comm.size > 1:
            highest = self._tag("B", self.last_stage, schedule.num_microbatches)
            assert highest <= comm.max_tag(), (highest, comm.max_tag())

    def run(self, program, get_batch, training=True):
        """Run one program; returns the outputs of the last stage by microbatch, where this rank has
        it.

        get_batch(mb) gives the rows of a microbatch. With training=False nothing is kept for a
        backward. Comm: the program's sends and receives over pp, plus what the stages' layers do
        over tp.
        """
        self.get_batch, self.training = get_batch, training
        self.stashes, self.inbox, self.outbox = {}, {}, {}
        self.sending, self.outputs, self.batches = [], {}, {}
        for instr in program:
            self.recorder.stage, self.recorder.mb = instr.stage, instr.mb
            getattr(self, f"_{instr.kind.lower()}")(instr)
            # Messages progress only while somebody asks after them; finished sends free their
            # arrays.
            self.sending = [send for send in self.sending if not send.test()]
            self.gradsync.test()
        for send in self.sending:
            send.wait()
        self.sending = []
        left = [*self.stashes, *self.inbox, *self.outbox]
        assert not left, f"the program ended with {left} unused"
        return self.outputs

    def _batch(self, mb):
        """The rows of a microbatch; reading them is a span of its own."""
        if mb not in self.batches:
            start = perf_counter_ns()
            self.batches[mb] = self.get_batch(mb)
            self.recorder.span("data", start, self.recorder.stage, mb)
        return self.batches[mb]

    def _tag(self, direction, stage, mb):
        """A tag of its own for each message: with two ranks, next and previous are the same
        neighbour.
        """
        return (stage * self.schedule.num_microbatches + mb) * 2 + (direction == "B")

    # Wire instructions. Keys of inbox and outbox: (direction, stage the array enters, mb).

    def _recv_f(self, instr):
        peer = self.schedule.rank_of(instr.stage - 1, instr.mb)
        self._receive("F", instr.stage, instr.mb, peer)

    def _recv_b(self, instr):
        peer = self.schedule.rank_of(instr.stage + 1, instr.mb)
        self._receive("B", instr.stage, instr.mb, peer)

    def _send_f(self, instr):
        self._send("F", instr.stage + 1, instr.mb)

    def _send_b(self, instr):
        self._send("B", instr.stage - 1, instr.mb)

    def _receive(self, direction, stage, mb, peer):
        """Post the receive of what enters `stage`, into a buffer that then belongs to the stage."""
        self.recorder.phase = PHASE_OF[direction]
        shape = self.stages[stage].in_shape(self._batch(mb))
        buffer = self.ops.empty(shape, label="buffers")
        tag = self._tag(direction, stage, mb)
        name = "activations" if direction == "F" else "gradients"
        self.inbox[direction, stage, mb] = self.comm.irecv(buffer, peer, tag, name)

    def _send(self, direction, stage, mb):
        """Post the send of what enters `stage` on its rank."""
        self.recorder.phase = PHASE_OF[direction]
        x = self.outbox.pop((direction, stage, mb))
        peer = self.schedule.rank_of(stage, mb)
        name = "activations" if direction == "F" else "gradients"
        self.sending.append(self.comm.isend(x, peer, self._tag(direction, stage, mb), name))

    def _take(self, direction, stage, mb):
        """What enters a stage: received, or left by another stage of this same rank."""
        pending = self.inbox.pop((direction, stage, mb), None)
        if pending is not None:
            return pending.wait()
        return self.outbox.pop((direction, stage, mb))

    # Compute instructions.

    def _f(self, instr):
        stage, mb = instr.stage, instr.mb
        x = self._take("F", stage, mb) if stage > 0 else None
        stash = Stash(self._batch(mb))
        self.recorder.phase = "F"
        start = perf_counter_ns()
        y = self.stages[stage].forward(x, stash)
        self._span("F", start, stage, mb)
        if self.training:
            self.stashes[stage, mb] = stash
        if stage == self.last_stage:
            self.outputs[mb] = y
        else:
            self.outbox["F", stage + 1, mb] = y

    def _b(self, instr):
        stage, mb = instr.stage, instr.mb
        dy = self._take("B", stage, mb) if stage < self.last_stage else None
        start = perf_counter_ns()
        dx = self.stages[stage].backward(dy, self.stashes.pop((stage, mb)), self.recorder)
        self._span("B", start, stage, mb)
        if stage > 0:
            self.outbox["B", stage - 1, mb] = dx

    def _i(self, instr):
        stage, mb = instr.stage, instr.mb
        dy = self._take("B", stage, mb) if stage < self.last_stage else None
        self.recorder.phase = "I"
        start = perf_counter_ns()
        dx = self.stages[stage].backward_input(dy, self.stashes[stage, mb])
        self._span("I", start, stage, mb)
        if stage > 0:
            self.outbox["B", stage - 1, mb] = dx

    def _w(self, instr):
        self.recorder.phase = "W"
        start = perf_counter_ns()
        self.stages[instr.stage].backward_weight(self.stashes.pop((instr.stage, instr.mb)))
        self._span("W", start, instr.stage, instr.mb)

    def _overlap_f_b(self, instr):
        """F of one microbatch, then B of another: one process has nothing to overlap them with."""
        self._f(instr)
        self.recorder.stage, self.recorder.mb = instr.stage_b, instr.mb_b
        self._b(instr._replace(stage=instr.stage_b, mb=instr.mb_b))

    def _reduce_grad(self, instr):
        self.recorder.phase = "sync"
        self.gradsync.start(instr.stage)

    def _span(self, kind, start, stage, mb):
        self.ops.synchronize()  # a span ends when the device is done, not when it was asked
        self.recorder.span(kind, start, stage, mb)
