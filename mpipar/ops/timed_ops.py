"""The array functions of a device, each call of a layer timed: `--trace-ops`.

TimedOps wraps the real functions, so nothing is slower without it. Outside the traced steps it only
passes calls on.
"""

from sys import _getframe
from time import perf_counter_ns

from mpipar.ops.functions import FUNCTIONS

PARTITION = "mpipar.partition"


def layer_of(frame) -> str:
    """The `name` of the function that a frame runs, else that of its `self`; "" without either.

    Helpers of mpipar/partition have neither; they get the name of the cut that calls them.
    """
    while True:
        local = frame.f_locals
        layer = local.get("name") or getattr(local.get("self"), "name", "")
        if layer or not frame.f_globals["__name__"].startswith(PARTITION):
            return layer
        frame = frame.f_back


class TimedOps:
    """Like the wrapped ops. While `active`, every call leaves an entry in recorder.operations.

    An entry holds layer (see `layer_of`), function, start and end (ns), step, stage, mb, phase.
    """

    def __init__(self, ops, recorder):
        self.active = False
        self._ops = ops
        for name in FUNCTIONS:
            setattr(self, name, self._timed(name, getattr(ops, name), recorder))

    def __getattr__(self, name):
        return getattr(self._ops, name)

    def _timed(self, name, function, recorder):
        synchronize = self._ops.synchronize

        def call(*arguments, **named):
            if not self.active:
                return function(*arguments, **named)
            start = perf_counter_ns()
            result = function(*arguments, **named)
            synchronize()  # an operation ends when the device is done
            end = perf_counter_ns()
            recorder.operations.append((layer_of(_getframe(1)), name, start, end, recorder.step,
                                        recorder.stage, recorder.mb, recorder.phase))
            return result

        return call
