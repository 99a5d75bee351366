"""Copies between a GPU and page-locked host memory, which run while the GPU computes.

Each direction has its own stream besides the current stream, which computes. Since a GPU has a copy
engine for each direction, a copy out, a copy in and products run at the same time. An event marks
the end of each copy, before which its memory must not be touched.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.ops.signature import DeviceArray, Shape


class Copies:
    """The copies of one rank. Before starting one, the caller synchronizes the computing stream.

    pinned(shape, dtype) returns page-locked memory.
    """

    def __init__(self, xp: ModuleType, pinned: Callable[[Shape, Any], np.ndarray]) -> None:
        self._xp, self._pinned = xp, pinned
        # Blocking streams would wait for the default stream, where products run.
        self._out = xp.cuda.Stream(non_blocking=True)
        self._in = xp.cuda.Stream(non_blocking=True)
        # (event of a copy to the host, what to call after it), in order
        self.leaving: deque[tuple[Any, Callable[[], object]]] = deque()
        # (event of a copy to the device, host memory that it reads)
        self._arriving: list[tuple[Any, np.ndarray]] = []

    def out(
        self, x: DeviceArray, then: Callable[[np.ndarray], object], host: np.ndarray | None = None
    ) -> np.ndarray:
        """Queue a copy of x to host memory, and return that; then(host) is called after it.

        host: page-locked memory from `room`, or new memory.
        """
        assert x.flags.c_contiguous, (x.shape, x.strides)
        host = self.room(x.shape, x.dtype) if host is None else host
        x.get(stream=self._out, out=host, blocking=False)
        self.leaving.append((self._out.record(), partial(then, host)))
        return host

    def hand_over(self, wait: bool = False) -> None:
        """Make the calls that follow finished copies to the host; wait: those of all copies.

        They are made in the order of the copies. A rank must wait for all of them before it blocks
        in MPI; otherwise the rank that it waits for could itself wait for a message that is still
        here.
        """
        while self.leaving and (wait or self.leaving[0][0].done):
            event, then = self.leaving.popleft()
            event.synchronize()
            then()

    def into(self, host: np.ndarray, x: DeviceArray) -> Any:
        """Queue a copy of host memory to x; return its event, for `use_after`."""
        x.set(host, stream=self._in)
        event = self._in.record()
        self._arriving.append((event, host))
        return event

    def use_after(self, event: Any) -> None:
        """Make what is computed from now on wait for the event."""
        self._xp.cuda.get_current_stream().wait_event(event)

    def room(self, shape: Shape, dtype: DTypeLike) -> np.ndarray:
        """Return new page-locked memory. Memory that copies to the device still read is kept."""
        self._arriving = [(event, host) for event, host in self._arriving if not event.done]
        return self._pinned(shape, dtype)
