"""Measured memory of one rank, to print beside the prediction."""

from __future__ import annotations

import resource
import tracemalloc


class PeakMemory:
    """Peak bytes in arrays between `start` and `stop`.

    On the CPU Python's allocator tracing counts NumPy's arrays and little else. It slows small
    allocations down, so it is on for the first step only. The peak of every later step is the same.
    On a GPU the peak is the size of CuPy's pool.
    """

    def __init__(self, ops):
        self.ops = ops
        self.peak = 0

    def start(self) -> None:
        if self.ops.device == "cpu":
            tracemalloc.start(1)

    def stop(self) -> None:
        if self.ops.device == "cpu":
            self.peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        else:
            self.peak = self.ops.xp.get_default_memory_pool().total_bytes()


def process_peak() -> int:
    """Largest resident size of this process so far in bytes, with libraries and MPI's buffers."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
