"""Measured memory of one rank, to print beside the prediction."""

from __future__ import annotations

import resource
import tracemalloc

import numpy as np

ARRAYS = np.lib.tracemalloc_domain  # by which NumPy marks the data of arrays


class PeakMemory:
    """Peak bytes in arrays between `start` and `stop`.

    On the CPU Python's allocator tracing counts them. It slows small allocations down, so it is on
    for the first step only. The peak of every later step is the same. On a GPU the peak is the size
    of CuPy's pool.

    peak: bytes of arrays. objects: bytes of everything else that Python has made meanwhile and
    still holds, such as what Numba's compiler keeps. They are not part of `peak`.
    """

    def __init__(self, ops):
        self.ops = ops
        self.peak = self.objects = 0

    def start(self) -> None:
        if self.ops.device == "cpu":
            tracemalloc.start(1)

    def stop(self) -> None:
        if self.ops.device == "cpu":
            together = tracemalloc.get_traced_memory()[1]
            others = tracemalloc.DomainFilter(inclusive=False, domain=ARRAYS)
            traces = tracemalloc.take_snapshot().filter_traces([others]).traces
            tracemalloc.stop()
            self.objects = sum(trace.size for trace in traces)
            self.peak = together - self.objects
        else:
            self.peak = self.ops.xp.get_default_memory_pool().total_bytes()


def process_peak() -> int:
    """Largest resident size of this process so far in bytes, with libraries and MPI's buffers."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
