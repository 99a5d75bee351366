"""mpipar with one planted fault on one rank: python faulty_run.py FAULT mpipar-arguments..."""

import os
import signal
import sys
import time

import numpy as np

from mpipar.checkpoint import weights
from mpipar.comm.group import Comm
from mpipar.commands import inputs, report
from mpipar.job import mpi, watchdog
from mpipar.layers.norm import LayerNorm
from mpipar.pipeline.engine import Engine
from mpipar.train.gradsync import GradSync
from mpipar.train.worker import Worker

FAULT = sys.argv.pop(1)
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def at_step(step, fault):
    """Replace LayerNorm.forward on rank 1: from `step` on, block 1's first norm runs `fault`."""
    plain = LayerNorm.forward
    calls = []

    def forward(self, x, stash):
        if self.name == "block1.norm1":
            calls.append(self.name)
            if len(calls) == step:
                fault()
        return plain(self, x, stash)

    LayerNorm.forward = forward


if RANK == 1 and FAULT == "sleep":
    at_step(6, lambda: time.sleep(1000))
if RANK == 1 and FAULT == "spin":
    at_step(6, lambda: [None for _ in iter(int, 1)])
if RANK == 1 and FAULT == "killed":
    at_step(6, lambda: os.kill(os.getpid(), signal.SIGKILL))
if RANK == 1 and FAULT == "stopped":
    at_step(6, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def after_sums(step, fault):
    """After the gradients of `step` are summed, rank 1 runs fault(its first stage's buffers)."""
    plain = GradSync.finish

    def finish(self):
        plain(self)
        if RANK == 1 and self.recorder.step == step:
            fault(self.flats[0])

    GradSync.finish = finish


if FAULT == "drift":
    after_sums(3, lambda flat: flat.master[-1:].view(np.uint32).__ixor__(1))
if (RANK, FAULT) == (1, "loaded"):
    plain_load = weights.load

    def load(worker, folder):
        plain_load(worker, folder)
        worker.flats[0].master[-1:].view(np.uint32).__ixor__(1)

    weights.load = load
if FAULT == "nan":
    after_sums(3, lambda flat: flat.grad[-1:].fill(np.nan))
if (RANK, FAULT) == (1, "nan-loss"):
    plain_run = Engine.run

    def run(self, program, get_batch, training=True):
        losses = plain_run(self, program, get_batch, training)
        return dict.fromkeys(losses, np.nan) if self.recorder.step == 3 else losses

    Engine.run = run
if FAULT == "raise":
    after_sums(3, lambda flat: 1 / 0)


def stop_in(owner, name):
    """Replace a function on rank 1 by one that stops its process."""
    if RANK == 1:
        setattr(owner, name, lambda *arguments, **more: os.kill(os.getpid(), signal.SIGSTOP))


PLACES = {  # of a process that stops outside the steps of a training run
    "stopped-start": (mpi, "initialize"), "stopped-data": (inputs, "prompt_tokens"),
    "stopped-setup": (Worker, "initialize"), "stopped-evaluation": (Worker, "evaluate"),
    "stopped-end": (mpi, "finalize"), "stopped-verify": (Worker, "gradients"),
    "stopped-generate": (Worker, "forward")}
if FAULT in PLACES:
    watchdog.START_SECONDS = 3.0  # one rank may be up that long before another
    stop_in(*PLACES[FAULT])
if FAULT == "slow-disk":  # for the weights: longer than any timer of a rank that ends
    plain_fsync = os.fsync

    def slow_fsync(number):
        if "/weights/model." in os.readlink(f"/proc/self/fd/{number}"):
            time.sleep(6)
        plain_fsync(number)

    os.fsync = slow_fsync
if FAULT == "slow-report":  # of a long trace
    plain_write = report.write
    report.write = lambda *told: (time.sleep(4), plain_write(*told))
if FAULT == "slow-first-start" and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    plain_step = Worker.train_step
    Worker.train_step = lambda *arguments: (time.sleep(2), plain_step(*arguments))[1]
if (RANK, FAULT) == (1, "delay"):  # late in every microbatch
    plain_forward = LayerNorm.forward
    microbatches = iter(range(6 * 2))  # of the training steps, not of the evaluation after them

    def late_forward(self, x, stash):
        real = self.name == "block1.norm1" and isinstance(x, np.ndarray)
        if real and next(microbatches, None) is not None:
            time.sleep(0.05)
        return plain_forward(self, x, stash)

    LayerNorm.forward = late_forward
if RANK == 1 and FAULT in ("missing", "mismatch"):
    plain_reduce = Comm.all_reduce

    def all_reduce(self, x, name, op="sum"):
        if name == "block1.attn.proj" and self.recorder.step == 2:
            if FAULT == "missing":
                return x
            return self.all_gather(x, name)[0]
        return plain_reduce(self, x, name, op)

    Comm.all_reduce = all_reduce

from mpipar.__main__ import main  # noqa: E402 (after the fault is planted)

if __name__ == "__main__":
    main()
