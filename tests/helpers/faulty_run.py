"""mpipar with one planted fault: python faulty_run.py FAULT mpipar-arguments...

FAULT is a key of FAULTS, with @NUMBER if it has a number. A key of LATE makes a rank or a link late
in each step, one of TWINS makes a run continue wrongly. PLACE/HOW/RANK makes a rank go wrong at a
place. Before training that is the first call of the place's function, in training the first one
from step STEP on. With nccl/ before it, every rank has a GPU of its own: a stand-in that MPI plays
in a thread. With a key of BENCH, mpipar net runs instead, and the all-reduce of rank 1 is
at fault.
"""

import ctypes
import errno
import gc
import itertools
import os
import signal
import sys
import time

import numpy as np

from mpipar import cli
from mpipar.comm.group import Comm
from mpipar.comm.mpi import MpiTransport
from mpipar.layers.norm import LayerNorm
from mpipar.pipeline.engine import Engine
from mpipar.run import checks, resolve, resume, training
from mpipar.run.checkpoint import state, weights
from mpipar.run.data import parts
from mpipar.run.data.rows import Rows
from mpipar.run.process import mpi, watchdog
from mpipar.run.process.session import Session, guard
from mpipar.study import report
from mpipar.train.gradsync import GradSync
from mpipar.train.optim import Optimizer
from mpipar.train.worker import Worker

NAME, _, NUMBER = sys.argv.pop(1).partition("@")
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
STEP = 4
MICROBATCHES, LATE_SECONDS = 2, 0.08
sessions, evaluating = [], []  # nothing is late in what follows the training


def around(owner, name, function, rank=None):
    """Let function(plain, *arguments) stand in for a function, on one rank or on all."""
    plain = getattr(owner, name)
    if rank in (None, RANK):
        setattr(owner, name, lambda *given, **named: function(plain, *given, **named))


def kill(sign):
    """A function that sends a signal to this process, whatever it is given."""
    return lambda *_, **__: os.kill(os.getpid(), sign)


def fail(*_):
    raise ValueError("a planted defect")


# --- in the steps of rank 1


def at_call(number, fault):
    """At this call of block 1's first norm, run the fault."""
    calls = []

    def forward(plain, norm, *rest):
        calls.extend([1] * (norm.name == "block1.norm1"))
        if norm.name == "block1.norm1" and len(calls) == number:
            fault()
        return plain(norm, *rest)

    around(LayerNorm, "forward", forward, 1)


def after_sums(fault):
    """After the gradients of step 3 are summed, run fault(the first stage's buffers)."""

    def finish(plain, sync):
        plain(sync)
        if sync.recorder.step == 3:
            fault(sync.flats[0])

    around(GradSync, "finish", finish, 1)


def flip(flat):
    """Change a bit of the last master weight."""
    flat.master[-1:].view(np.uint32).__ixor__(1)


def nan_loss(plain, engine, *rest, **named):
    losses = plain(engine, *rest, **named)
    return dict.fromkeys(losses, np.nan) if engine.recorder.step == 3 else losses


def other_call(plain, comm, x, name, op="sum"):
    """In step 2 one sum is missing on rank 1, or is another collective there."""
    if name == "block1.attn.proj" and comm.recorder.step == 2:
        return x if NAME == "missing" else comm.all_gather(x, name)[0]
    return plain(comm, x, name, op)


def slow_fsync(plain, number):
    if "/weights/model." in os.readlink(f"/proc/self/fd/{number}"):
        time.sleep(6)  # longer than any timer of a rank that ends
    plain(number)


# --- late in each step: LATE_SECONDS, but for links of dp and tp in each transfer


def pause(owner, name, seconds, when=lambda *_: True, rank=1):
    """Calls of a function sleep first, in training, where `when` holds of its arguments."""

    def paused(plain, *given, **named):
        if not evaluating and when(*given):
            time.sleep(seconds)
        return plain(*given, **named)

    around(owner, name, paused, rank)


def is_late_layer(norm, x, *_):
    """Whether this is the first norm of block 1, on numbers."""
    return norm.name == "block1.norm1" and isinstance(x, np.ndarray)


def collecting():
    """A garbage collection that takes long."""
    gc.callbacks.insert(0, lambda phase, info: phase == "stop" and time.sleep(LATE_SECONDS / 2))
    gc.collect()
    gc.callbacks.pop(0)
    return False


class LateRequest:
    """A request whose data travel for longer, one transfer after the other."""

    free = 0.0  # when the link has carried all before

    def __init__(self, request):
        self.request, self.there = request, None

    def Test(self):
        if self.there is None and self.request.Test():
            more = 0 if evaluating else LATE_SECONDS / MICROBATCHES
            self.there = LateRequest.free = max(LateRequest.free, time.monotonic()) + more
        return self.there is not None and time.monotonic() >= self.there

    def Wait(self):
        while not self.Test():
            time.sleep(1e-4)


def slow(name, when=lambda *_: True, rank=None):
    """Make the requests of a call of the transport late, where `when` holds of its arguments."""

    def posted(plain, wire, *given):
        request = plain(wire, *given)
        return LateRequest(request) if when(*given) else request

    around(MpiTransport, name, posted, rank)


# --- ends, full disks, and runs that go on with a mistake


def at_step(plain, worker, step, *rest):
    """Send a signal when step NUMBER begins, which continues when the signal has been heard."""
    if step == int(NUMBER):
        kill({"kill": signal.SIGKILL, "stop": signal.SIGTERM}[NAME])()
        while not sessions[0].stop_requested:
            time.sleep(0.001)
    return plain(worker, step, *rest)


def full_disk():
    """No space for the NUMBERth file of pieces of this process; full: for later ones too."""
    written = []

    def write_new(plain, path, chunks):
        if path.name.startswith("pieces"):
            written.append(path)
            if len(written) == int(NUMBER) or (NAME == "full" and len(written) > int(NUMBER)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(path, chunks)

    around(state, "write_new", write_new)


TWINS = {  # what is wrong with the state of a run that goes on
    "nothing": lambda worker: None,
    "moments": lambda worker: [
        buffer.fill(0) for flat in worker.flats for buffer in flat.moments.values()
    ],
    "good": lambda worker: setattr(worker.loss_scale, "good", 0),
    "skipped": lambda worker: setattr(worker.loss_scale, "skipped", 0),
    "scale": lambda worker: setattr(worker.loss_scale, "value", 2.0**20),
    "publish": lambda worker: [flat.data.fill(0) for flat in worker.flats],
}
PLACES = {  # where a rank goes wrong -> the owner of a function, and its name
    "forward": (LayerNorm, "forward"),
    "backward": (LayerNorm, "backward_beside"),
    "send": (MpiTransport, "isend"),
    "receive": (MpiTransport, "irecv"),
    "all-reduce": (MpiTransport, "all_reduce"),
    "optimizer": (Optimizer, "step"),
    "save": (state, "write_new"),
    "commit": (state, "put_in_place"),
    "evaluation": (checks, "evaluate"),
    "finalize": (Session, "finish"),
    "MPI_Finalize": (mpi, "finalize"),
}
BEFORE_TRAINING = {  # or without
    "init": (Session, "start"),
    "reading the data": (parts, "load"),
    "MPI_Init": (mpi, "initialize"),
    "prompt": (resolve, "prompt_tokens"),
    "setup": (Worker, "initialize"),
    "gradients": (Worker, "gradients"),
    "generation": (Worker, "forward"),
}
WAYS = {
    "raise": fail,
    "kill": kill(signal.SIGKILL),
    "term": kill(signal.SIGTERM),
    "interrupt": kill(signal.SIGINT),
    "usr1": kill(signal.SIGUSR1),
    "hangup": kill(signal.SIGHUP),
    "stop": kill(signal.SIGSTOP),
    "leave": lambda: ctypes.CDLL(None).exit(0),
}
FAULTS = {
    "none": lambda: None,
    "sleep": lambda: at_call(6, lambda: time.sleep(1000)),
    "spin": lambda: at_call(6, lambda: [None for _ in iter(int, 1)]),
    "stopped": lambda: at_call(6, kill(signal.SIGSTOP)),
    "drift": lambda: after_sums(flip),
    "nan": lambda: after_sums(lambda flat: flat.grad[-1:].fill(np.nan)),
    "nan-loss": lambda: around(Engine, "run", nan_loss, 1),
    "loaded": lambda: around(
        weights,
        "load",
        lambda plain, worker, folder: (plain(worker, folder), flip(worker.flats[0])),
        1,
    ),
    "missing": lambda: around(Comm, "all_reduce", other_call, 1),
    "mismatch": lambda: around(Comm, "all_reduce", other_call, 1),
    "slow-disk": lambda: around(os, "fsync", slow_fsync),
    "slow-report": lambda: around(
        report,
        "write",
        lambda plain, *told: (  # of a long trace
            time.sleep(4),
            plain(*told),
        ),
    ),
    "slow-first-start": lambda: (
        os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
        and around(Worker, "train_step", lambda plain, *given: (time.sleep(2), plain(*given))[1])
    ),
    "kill": lambda: around(Worker, "train_step", at_step),
    "stop": lambda: around(Worker, "train_step", at_step),
    "no-space": full_disk,
    "full": full_disk,
    "metrics": lambda: around(training, "truncate_after", lambda plain, folder, step: []),
}


LATE = {
    "delay": lambda: pause(LayerNorm, "forward", 0.05, is_late_layer),
    "data": lambda: pause(Rows, "train", LATE_SECONDS, lambda _rows, _step, mb: mb == 0),
    "F": lambda: pause(LayerNorm, "forward", LATE_SECONDS / MICROBATCHES, is_late_layer),
    "B": lambda: pause(LayerNorm, "backward_beside", LATE_SECONDS / MICROBATCHES, is_late_layer),
    "gc": lambda: pause(
        LayerNorm, "forward", 0, lambda *given: is_late_layer(*given) and collecting()
    ),
    "opt": lambda: pause(Optimizer, "step", LATE_SECONDS),
    "save": lambda: pause(state, "write_pieces", LATE_SECONDS),
    "between": lambda: pause(training.Run, "show_step", LATE_SECONDS),
    "dp link": lambda: slow("iall_reduce"),
    "tp link": lambda: pause(
        MpiTransport, "all_reduce", 0.03, lambda _wire, x, _op: x.size > 100, None
    ),  # not the norm
    "pp link": lambda: slow("irecv", lambda _x, peer, _tag: peer == 0, 1),  # from rank 0
}


BENCH = {  # what happens at the end of an all-reduce, given its array and how many there were
    "wrong": lambda x, calls: x[-1:].__iadd__(1),
    "stall": lambda x, calls: calls > 5 and time.sleep(600),  # after the check and the warm-up
}


def go_wrong(place, how, rank):
    """Let the first call that the place is armed for go wrong."""
    armed = [place] if place in BEFORE_TRAINING else []

    def wrong(plain, *given, **named):
        if armed:
            armed.clear()
            WAYS[how]()
        return plain(*given, **named)

    def train_step(plain, worker, step, *rest):
        if step == STEP and place not in BEFORE_TRAINING:
            armed.append(place)
        return plain(worker, step, *rest)

    around(*(PLACES | BEFORE_TRAINING)[place], wrong, rank)
    around(Worker, "train_step", train_step, rank)


def with_nccl(plain, library):
    """Start MPI, and put in the stand-ins for CuPy and NCCL."""
    plain(library)
    import fake_cupy
    import pytest

    fake_cupy.put_in_nccl(pytest.MonkeyPatch())


def faulty_bench():
    """Let the benchmark run, with a fault in each all-reduce of rank 1."""
    calls = itertools.count(1)

    def all_reduce(plain, wire, x, op):
        plain(wire, x, op)
        BENCH[NAME](x, next(calls))

    around(MpiTransport, "all_reduce", all_reduce, 1)
    around(
        cli,
        "main",
        lambda plain, argv, session: plain(["net", *argv], session),
    )


def run(argv, session):
    sessions.append(session)
    return cli.main(argv, session)


if NAME.startswith("nccl/"):
    around(mpi, "initialize", with_nccl)
if "/" in NAME:
    where, way, at_fault = NAME.removeprefix("nccl/").split("/")
    watchdog.START_SECONDS = 3.0  # one rank may be up that long before another
    go_wrong(where, way, int(at_fault))
elif NAME in TWINS:
    around(
        resume,
        "load_state",
        lambda plain, worker, *rest: (plain(worker, *rest), TWINS[NAME](worker)),
    )
elif NAME in BENCH:
    faulty_bench()
elif NAME in LATE:
    around(checks, "evaluate", lambda plain, *given: (evaluating.append(True), plain(*given))[1])
    LATE[NAME]()
else:
    FAULTS[NAME]()
if __name__ == "__main__":
    guard(run)
