"""The array functions of a device, each call of a layer timed: `--trace-ops`.

A wrapper around the real ones, so that without it nothing is slower. Outside the traced steps it
only passes calls on.
"""

from sys import _getframe
from time import perf_counter_ns

# What makes or moves arrays belongs to no layer.
PLUMBING = ("empty", "zeros", "asarray", "to_host", "to_pinned", "pinned", "synchronize",
            "scalar")


class TimedOps:
    """Like the wrapped ops; while `active`, every call leaves an entry in recorder.operations.

    An entry: layer, function, start and end (ns), step, stage, mb, phase. The layer is the caller's
    `name` (the functions of mpipar/partition), else that of its `self` (the layers).
    """

    def __init__(self, ops, recorder):
        self.active = False
        self._ops = ops
        for name in dir(ops):
            function = getattr(ops, name)
            if callable(function) and not name.startswith("_") and name not in PLUMBING:
                setattr(self, name, self._timed(name, function, recorder))

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
            local = _getframe(1).f_locals
            layer = local.get("name") or getattr(local.get("self"), "name", "")
            recorder.operations.append((layer, name, start, end, recorder.step, recorder.stage,
                                        recorder.mb, recorder.phase))
            return result

        return call
