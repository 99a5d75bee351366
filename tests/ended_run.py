"""mpipar that ends too early: python ended_run.py HOW NUMBER mpipar-arguments...

HOW is `kill` or `stop`: SIGKILL or SIGTERM to this process when step NUMBER begins. The step goes
on when SIGTERM has been heard. `evaluate`: SIGKILL when the evaluation begins. `no-space`: the disk
is full for the NUMBERth file of pieces that this process writes. `full`: also for all later ones.
Others: one of TWINS, a run that goes on with a mistake.
"""

import errno
import os
import signal
import sys
import time

from mpipar.checkpoint import save
from mpipar.cli import main
from mpipar.commands import resume, training
from mpipar.job.session import guard
from mpipar.train.worker import Worker

HOW, NUMBER = sys.argv.pop(1), int(sys.argv.pop(1))
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}
plain_step, plain_write = Worker.train_step, save.write_new
written, sessions = [], []


def train_step(self, step, *rest):
    if step == NUMBER:
        os.kill(os.getpid(), SIGNALS[HOW])
        while not sessions[0].stop_requested:
            time.sleep(0.001)
    return plain_step(self, step, *rest)


def write_new(path, chunks):
    if path.name.startswith("pieces"):
        written.append(path)
        if len(written) == NUMBER or (HOW == "full" and len(written) > NUMBER):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return plain_write(path, chunks)


def forget_moments(worker):
    for flat in worker.flats:
        for buffer in flat.moments.values():
            buffer[:] = 0


TWINS = {  # what is wrong with the state of a run that goes on
    "nothing": lambda worker: None,
    "moments": forget_moments,
    "good": lambda worker: setattr(worker.loss_scale, "good", 0),
    "skipped": lambda worker: setattr(worker.loss_scale, "skipped", 0),
    "scale": lambda worker: setattr(worker.loss_scale, "value", 2.0**20),
    "publish": lambda worker: [flat.data.fill(0) for flat in worker.flats],
}
plain_load = resume.load_state


def load_state(worker, *rest):
    plain_load(worker, *rest)
    TWINS[HOW](worker)


if HOW == "metrics":
    training.cut_behind = lambda folder, step: []
elif HOW in TWINS:
    resume.load_state = load_state
elif HOW in SIGNALS:
    Worker.train_step = train_step
elif HOW == "evaluate":
    Worker.evaluate = lambda self, rows: os.kill(os.getpid(), signal.SIGKILL)
else:
    save.write_new = write_new


def run(argv, session):
    sessions.append(session)
    return main(argv, session)


guard(run)
