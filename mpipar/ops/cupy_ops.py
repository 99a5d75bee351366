"""The array functions on a GPU through CuPy: the plain ones, and what only a device needs."""

import math

import numpy as np

from mpipar.errors import EnvironmentProblem
from mpipar.ops.array_ops import ArrayOps


class CupyOps(ArrayOps):
    """The array functions of `ArrayOps` on the current CUDA device.

    Raises EnvironmentProblem when CuPy or a usable GPU is missing.
    """

    def __init__(self, dtype):
        super().__init__(_usable_cupy(), dtype, "cuda")

    def to_host(self, x):
        """Return x copied to a NumPy array; waits for the device."""
        return self.xp.asnumpy(x)

    def select_device(self, host_rank):
        """Take the GPU whose number is host_rank, counted round when there are fewer GPUs."""
        self.xp.cuda.Device(host_rank % self.xp.cuda.runtime.getDeviceCount()).use()

    def pinned(self, shape, dtype):
        """Return an uninitialised host array in page-locked memory, which copies run fastest on."""
        dtype = np.dtype(dtype)
        count = math.prod(shape)
        memory = self.xp.cuda.alloc_pinned_memory(max(1, count * dtype.itemsize))
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def to_pinned(self, x):
        """Return x copied to page-locked host memory; waits for the device."""
        host = self.pinned(x.shape, x.dtype)
        x.get(out=host)
        return host

    def synchronize(self):
        """Wait until everything queued on the current stream is done."""
        self.xp.cuda.get_current_stream().synchronize()


def _usable_cupy():
    """Return the module cupy after one small computation on the device."""
    try:
        import cupy
    except ImportError as error:
        raise EnvironmentProblem(
            f"--device cuda needs CuPy, which cannot be imported here ({error}): install it with "
            "pip install '.[cuda]' (CUDA 12: '.[cuda12]'), or type --device cpu"
        ) from error
    try:
        # Not only a driver: a compiled kernel, which a missing CUDA library or a too new GPU
        # stops. CUDA errors are RuntimeErrors; a library that cannot be loaded is one of the rest.
        float((cupy.ones(2) * 2).sum())
    except (RuntimeError, OSError, ImportError) as error:
        raise EnvironmentProblem(
            f"--device cuda needs a usable GPU, and CuPy cannot compute on one here ({error}): "
            "start on a node with a GPU and its driver, or type --device cpu"
        ) from error
    return cupy
