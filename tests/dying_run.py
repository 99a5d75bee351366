"""mpipar with one rank that goes wrong: python dying_run.py RANK PLACE HOW mpipar-arguments...

PLACE is a key of PLACES, and HOW one of WAYS. Before training the first call of the place's
function goes wrong, in training the first one from step STEP on.
"""

import os
import signal
import sys

from mpipar import data
from mpipar.checkpoint import save
from mpipar.comm.transport import HostTransport
from mpipar.job import session
from mpipar.layers.norm import LayerNorm
from mpipar.train.optim import AdamW
from mpipar.train.worker import Worker

STEP = 4
BEFORE_TRAINING = ("init", "reading the data")
PLACES = {  # where -> the owner of a function, and its name
    "init": (session.Session, "start"),
    "reading the data": (data.rows, "load"),
    "forward": (LayerNorm, "forward"),
    "backward": (LayerNorm, "backward_input"),
    "send": (HostTransport, "isend"),
    "receive": (HostTransport, "irecv"),
    "all-reduce": (HostTransport, "all_reduce"),
    "optimizer": (AdamW, "step"),
    "save": (save, "write_new"),
    "commit": (save, "put_in_place"),
    "evaluation": (Worker, "evaluate"),
    "finalize": (session.Session, "finish"),
}


def fail():
    raise ValueError("a planted defect")


def signal_myself(sign):
    return lambda: os.kill(os.getpid(), sign)


WAYS = {"raise": fail, "kill": signal_myself(signal.SIGKILL), "term": signal_myself(signal.SIGTERM),
        "interrupt": signal_myself(signal.SIGINT), "usr1": signal_myself(signal.SIGUSR1),
        "hangup": signal_myself(signal.SIGHUP), "leave": lambda: os._exit(0),
        "segv": signal_myself(signal.SIGSEGV)}


def plant(place: str, how: str) -> None:
    """Let the first call that the place is armed for go wrong."""
    owner, name = PLACES[place]
    plain, plain_step = getattr(owner, name), Worker.train_step
    armed = [place] if place in BEFORE_TRAINING else []

    def wrong(*arguments, **options):
        if armed:
            armed.clear()
            WAYS[how]()
        return plain(*arguments, **options)

    def train_step(self, step, *arguments):
        if step == STEP:
            armed.append(place)
        return plain_step(self, step, *arguments)

    setattr(owner, name, wrong)
    if not armed:
        Worker.train_step = train_step


def main():
    rank, place, how = sys.argv[1:4]
    del sys.argv[1:4]
    launched = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    if rank == launched:
        plant(place, how)

    from mpipar.__main__ import main as mpipar

    mpipar()


if __name__ == "__main__":
    main()
