"""Measured memory of one rank, to print beside the prediction."""

import resource
import tracemalloc

import numpy as np

ARRAYS = np.lib.tracemalloc_domain  # NumPy's mark for the data of arrays


class PeakMemory:
    """Peak bytes of arrays in a training step.

    On the CPU Python's allocation tracing counts them, during the first two steps only, because it
    slows down small allocations. Of two steps only the second one's peak is used: in the first, a
    compiler such as Numba's temporarily takes memory that is no array. On a GPU the peak is what
    CuPy's pool holds: arrays, and freed blocks that fitted no later array. `peak` leaves out all
    else that Python allocated meanwhile and still holds, such as what Numba's compiler keeps.
    """

    def __init__(self, ops):
        self.ops, self.counts = ops, ops.device == "cpu"
        self.peak = self.steps = 0

    def start(self) -> None:
        """Begin before the run creates any array."""
        if self.counts:
            tracemalloc.start(1)

    def after_step(self, is_last: bool) -> bool:
        """Return whether this step was watched. is_last: whether no step follows."""
        self.steps += 1
        if self.steps == 2 or (self.steps == 1 and is_last):
            self.stop()
        elif self.steps == 1 and self.counts:
            tracemalloc.reset_peak()
        return self.steps <= 2

    def stop(self) -> None:
        """Record the peak since `start`, or since the first step."""
        if not self.counts:
            self.peak = self.ops.xp.get_default_memory_pool().total_bytes()
            return
        together = tracemalloc.get_traced_memory()[1]
        traces = tracemalloc.take_snapshot().traces
        tracemalloc.stop()
        self.peak = together - sum(trace.size for trace in traces if trace.domain != ARRAYS)


def process_peak() -> int:
    """Return this process's peak resident size in bytes, with libraries and MPI's buffers."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
