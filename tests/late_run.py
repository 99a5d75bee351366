"""mpipar with a rank or a link that is late in each step: python late_run.py FAULT arguments...

FAULT: data, F, B, gc, opt, save or between (each on rank 1), none, or a key of LINKS. The pp link
leads from rank 0 to rank 1. LATE_SECONDS per step, but for links of dp and tp each transfer.
"""

import gc
import os
import sys
import time

import numpy as np

from mpipar.checkpoint import save
from mpipar.comm.transport import HostTransport
from mpipar.commands.training import Run
from mpipar.data.rows import Rows
from mpipar.layers.norm import LayerNorm
from mpipar.train.optim import OPTIMIZERS
from mpipar.train.worker import Worker

FAULT = sys.argv.pop(1)
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
MICROBATCHES = 2
LATE_SECONDS = 0.08
evaluating = []  # no fault is planted in what follows the training


def late(owner, name, seconds, when=lambda *_: True):
    """Make calls of a function sleep first, where `when` holds of its arguments."""
    plain = getattr(owner, name)

    def replaced(*arguments, **named):
        if not evaluating and when(*arguments):
            time.sleep(seconds)
        return plain(*arguments, **named)

    setattr(owner, name, replaced)


def late_layer(norm, x, _stash, _residual=None):
    """Whether this is the first norm of block 1, on numbers."""
    return norm.name == "block1.norm1" and isinstance(x, np.ndarray)


class SlowRequest:
    """A request whose data travel for longer, one transfer after the other."""

    free = 0.0  # when the link has carried all before

    def __init__(self, request):
        self.request, self.there = request, None

    def Test(self):
        if self.there is None and self.request.Test():
            late = 0 if evaluating else LATE_SECONDS / MICROBATCHES
            self.there = SlowRequest.free = max(SlowRequest.free, time.monotonic()) + late
        return self.there is not None and time.monotonic() >= self.there

    def Wait(self):
        while not self.Test():
            time.sleep(1e-4)


def slow(name, when=lambda *_: True):
    """Make the requests of a call of the transport slow, where `when` holds of its arguments."""
    plain = getattr(HostTransport, name)

    def replaced(self, *arguments):
        request = plain(self, *arguments)
        return SlowRequest(request) if when(*arguments) else request

    setattr(HostTransport, name, replaced)


def collecting(*_):
    """A garbage collection that takes long."""
    gc.callbacks.insert(0, lambda phase, info: phase == "stop" and time.sleep(LATE_SECONDS / 2))
    gc.collect()
    gc.callbacks.pop(0)
    return False


PLANT = {
    "data": lambda: late(Rows, "train", LATE_SECONDS, lambda _rows, _step, mb: mb == 0),
    "F": lambda: late(LayerNorm, "forward", LATE_SECONDS / MICROBATCHES, late_layer),
    "B": lambda: late(LayerNorm, "backward_input", LATE_SECONDS / MICROBATCHES, late_layer),
    "gc": lambda: late(LayerNorm, "forward", 0,
                       lambda *given: late_layer(*given) and collecting()),
    "opt": lambda: [late(one, "step", LATE_SECONDS) for one in set(OPTIMIZERS.values())],
    "save": lambda: late(save, "write_pieces", LATE_SECONDS),
    "between": lambda: late(Run, "show_step", LATE_SECONDS),
}
late(Worker, "evaluate", 0, lambda *_: evaluating.append(True))
LINKS = {
    "dp link": lambda: slow("iall_reduce"),
    "tp link": lambda: late(HostTransport, "all_reduce", 0.03,
                            lambda _transport, x, _op: x.size > 100),  # not the norm
    "pp link": lambda: RANK == 1 and slow("irecv", lambda _x, peer, _tag: peer == 0),
}
if FAULT in LINKS:
    LINKS[FAULT]()
elif RANK == 1 and FAULT != "none":
    PLANT[FAULT]()

from mpipar.__main__ import main  # noqa: E402 (after the fault is planted)

if __name__ == "__main__":
    main()
