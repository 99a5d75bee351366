"""mpipar that ends too early: python ended_run.py HOW NUMBER mpipar-arguments...

HOW is `kill` or `stop`: SIGKILL or SIGTERM to this process when step NUMBER begins. `evaluate`:
SIGKILL when the evaluation begins. `no-space`: the disk is full for the NUMBERth file of pieces
that this process writes. `full`: also for all later ones.
"""

import errno
import os
import signal
import sys

from mpipar.checkpoint import save
from mpipar.cli import main
from mpipar.job.session import guard
from mpipar.train.worker import Worker

HOW, NUMBER = sys.argv.pop(1), int(sys.argv.pop(1))
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}
plain_step, plain_write = Worker.train_step, save.write_new
written = []


def train_step(self, step, *rest):
    if step == NUMBER:
        os.kill(os.getpid(), SIGNALS[HOW])
    return plain_step(self, step, *rest)


def write_new(path, chunks):
    if path.name.startswith("pieces"):
        written.append(path)
        if len(written) == NUMBER or (HOW == "full" and len(written) > NUMBER):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return plain_write(path, chunks)


if HOW in SIGNALS:
    Worker.train_step = train_step
elif HOW == "evaluate":
    Worker.evaluate = lambda self, rows: os.kill(os.getpid(), signal.SIGKILL)
else:
    save.write_new = write_new

guard(main)
