"""`--memory-limit`: limits the bytes of each rank's arrays, and names the array that did not fit.

On the CPU the kernel enforces it through RLIMIT_DATA, the private memory of the process, and matrix
products use one thread. On a GPU CuPy's pool enforces it. A layer that is too large for one device
thus fails here as it would there.
"""

from __future__ import annotations

import re
import resource
import traceback
from math import prod

from threadpoolctl import threadpool_limits

from mpipar.comm.record import place
from mpipar.console.tables import nbytes
from mpipar.errors import OutOfMemory
from mpipar.job.malloc import give_back_heap, keep_heap

# What a process takes after its start besides the model's arrays: thread stacks, Python objects,
# scratch tiles.
RESERVE_BYTES = 16 << 20
LESS = (
    "more ranks (--tp, --pp), --recompute block or fewer rows (--batch-size) need less, and mpipar"
    " explain shows what each rank of a layout holds"
)
PASSES = {
    "F": "forward pass",
    "I": "input gradient",
    "recompute": "recomputation",
    "W": "weight gradient",
    "opt": "update",
}


class MemoryLimit:
    """Context manager: inside, arrays are limited to the config's --memory-limit; None: no limit.

    A MemoryError becomes OutOfMemory, with the array, and the bytes wanted and left.
    """

    def __init__(self, config, ops, recorder):
        self.ops, self.recorder = ops, recorder
        self.budget = config.run.memory_limit

    def __enter__(self):
        if self.budget is not None and self.ops.device == "cuda":
            self._pool().set_limit(size=self.budget)
        elif self.budget is not None:
            # The first product makes BLAS allocate its own buffers. It runs before the limit is
            # set, so that they do not count.
            warm = self.ops.zeros((512, 512), label="buffers")
            self.ops.matmul(warm, warm)
            # With more threads OpenBLAS allocates for each product, and if it cannot, it ends the
            # process without saying why.
            self.blas = threadpool_limits(1, "blas")
            give_back_heap()
            self.before = resource.getrlimit(resource.RLIMIT_DATA)
            self.limit = data_bytes() + self.budget + RESERVE_BYTES
            if self.before[1] != resource.RLIM_INFINITY:
                self.limit = min(self.limit, self.before[1])
            resource.setrlimit(resource.RLIMIT_DATA, (self.limit, self.before[1]))
        return self

    def __exit__(self, kind, error, trace):
        out_of_memory = isinstance(error, MemoryError) or str(error) == "can't start new thread"
        left = self._bytes_left() if out_of_memory else None
        if self.budget is not None and self.ops.device == "cuda":
            self._pool().set_limit(size=0)  # none
        elif self.budget is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self.before)
            keep_heap()
            self.blas.restore_original_limits()
        if out_of_memory:
            raise OutOfMemory(self._problem(error, left)) from error

    def _pool(self):
        return self.ops.xp.get_default_memory_pool()

    def _bytes_left(self) -> int | None:
        if self.budget is None:
            return None
        if self.ops.device == "cuda":
            return max(0, self.budget - self._pool().used_bytes())
        return max(0, self.limit - data_bytes())

    def _problem(self, error, left) -> str:
        wanted = bytes_wanted(error)
        text = (
            f"out of memory: {tensor(error)}{self._when()} wants"
            f" {'some bytes' if wanted is None else nbytes(wanted)}"
        )
        if self.budget is None:
            return f"{text}, and this host has no more; {LESS}"
        # Memory that was freed while the error propagated counts as left, such as a finished stage.
        freed = wanted is not None and left >= wanted
        when = " (by now; less when it was requested)" if freed else ""
        return (
            f"{text}, but {nbytes(left)} are left{when} of --memory-limit {self.budget}"
            f" ({nbytes(self.budget)}{self._beside()}); {LESS}"
        )

    def _beside(self) -> str:
        return (
            ""
            if self.ops.device == "cuda"
            else (f", and {nbytes(RESERVE_BYTES)} more for everything but the model's arrays")
        )

    def _when(self) -> str:
        recorder = self.recorder
        if recorder.phase not in PASSES:
            return ""
        if recorder.stage < 0:
            return f", {PASSES[recorder.phase]},"
        return f", {PASSES[recorder.phase]} of stage {recorder.stage}, microbatch {recorder.mb},"


def data_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts: its writable private memory."""
    with open("/proc/self/status") as file:
        found = re.search(r"^VmData:\s+(\d+) kB", file.read(), re.MULTILINE)
    return int(found[1]) * 1024


def bytes_wanted(error: Exception) -> int | None:
    """Return the size of the failed allocation from NumPy's or CuPy's error; None if unknown."""
    if hasattr(error, "shape"):
        return prod(error.shape) * error.dtype.itemsize
    found = re.search(r"allocating ([\d,]+) bytes", str(error))
    return int(found[1].replace(",", "")) if found else None


def tensor(error: Exception) -> str:
    """Return what could not be allocated: its label, shape, layer, and source line.

    As in `ops/timed_ops.py`, the layer is the `name` of a function, else that of its `self`.
    """
    label = layer = site = ""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        where = place(frame.f_code.co_filename, line)
        if not where.startswith("mpipar/"):
            continue
        local = frame.f_locals
        label = label or local.get("label", "")
        in_ops = where.startswith("mpipar/ops/")
        site = site or ("" if in_ops else where)
        layer = local.get("name") or getattr(local.get("self"), "name", "")
        if layer and not in_ops:
            break
    shape = f" {tuple(error.shape)} {error.dtype}" if hasattr(error, "shape") else ""
    return f"{label or 'a result'}{shape}{f' of {layer}' if layer else ''} ({site})"
