"""Measured memory of one rank, to print beside the prediction."""

from __future__ import annotations

import resource
import tracemalloc

import numpy as np

ARRAYS = np.lib.tracemalloc_domain  # by which NumPy marks the data of arrays


class PeakMemory:
    """Peak bytes in arrays of a training step.

    On the CPU Python's allocator tracing counts them, for the first two steps: it slows small
    allocations down. Only the second step's peak counts, if there is one. In the first step a
    compiler, such as Numba's, takes memory that is no array and gives it back. On a GPU the peak is
    what CuPy's pool holds: arrays, and freed pieces of memory that fitted no later array.

    peak: bytes of arrays. objects: bytes of everything else that Python has made meanwhile and
    still holds, such as what Numba's compiler keeps. They are not part of `peak`.
    """

    def __init__(self, ops):
        self.ops = ops
        self.peak = self.objects = self.steps = 0

    def start(self) -> None:
        """Begin before any array of the run exists."""
        if self.ops.device == "cpu":
            tracemalloc.start(1)

    def after_step(self, is_last: bool) -> bool:
        """Return whether this step was watched. is_last: whether no step follows."""
        self.steps += 1
        if self.steps > 2:
            return False
        if self.steps == 2 or is_last:
            self.stop()
        elif self.ops.device == "cpu":
            tracemalloc.reset_peak()
        return True

    def stop(self) -> None:
        """Take the peak since `start`, or since the first step."""
        if self.ops.device != "cpu":
            self.peak = self.ops.xp.get_default_memory_pool().total_bytes()
        else:
            together = tracemalloc.get_traced_memory()[1]
            traces = tracemalloc.take_snapshot().traces
            tracemalloc.stop()
            self.objects = sum(trace.size for trace in traces if trace.domain != ARRAYS)
            self.peak = together - self.objects


def process_peak() -> int:
    """Largest resident size of this process so far in bytes, with libraries and MPI's buffers."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
