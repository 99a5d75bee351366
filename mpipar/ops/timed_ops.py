"""The array functions of a device, with each call of a layer timed: a run with `--trace`.

TimedOps wraps the real functions, so nothing is slower without it. Outside the traced steps it only
passes calls on.
"""

from sys import _getframe
from time import perf_counter_ns
from types import FrameType
from typing import Any

from mpipar.ops.functions import MEMORY, Ops
from mpipar.ops.signature import Function


def layer_of(frame: FrameType) -> str:
    """Return the `name` in the function that a frame runs, else that of its `self`.

    Helpers of layers/parallel have neither; they get the name of the cut that calls them.
    """
    while True:
        local = frame.f_locals
        layer = str(local.get("name") or getattr(local.get("self"), "name", ""))
        if layer or not frame.f_globals["__name__"].startswith("mpipar.layers.parallel"):
            return layer
        assert frame.f_back
        frame = frame.f_back


class TimedOps(Ops):
    """The wrapped ops. While `active`, every call leaves an entry in recorder.operations.

    An entry holds layer (see `layer_of`), function, start and end (ns), step, stage, mb, phase.
    """

    def __init__(self, ops: Ops, recorder: Any) -> None:
        self.active = False
        self._ops, self._recorder = ops, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _call(self, function: Function, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        real = getattr(self._ops, function.name)
        if not self.active or function.name in MEMORY:
            return real(*arguments, **named)
        start = perf_counter_ns()
        result = real(*arguments, **named)
        self._ops.synchronize()  # an operation ends when the device is done
        end, now = perf_counter_ns(), self._recorder
        now.operations.append(
            (
                layer_of(_getframe(2)),
                function.name,
                start,
                end,
                now.step,
                now.stage,
                now.mb,
                now.phase,
            )
        )
        return result
