"""Compiles the kernels of this folder at their first use and starts them, through CuPy."""

from mpipar.errors import EnvironmentProblem
from mpipar.ops.cuda import kernels

OLDEST_DEVICE = 80  # compute capability: the first with bfloat16 products and cp.async

# A kernel has to ask for more shared memory than this.
PLAIN_SHARED_BYTES = 48 << 10


class Loader:
    """The kernels of one device.

    CuPy compiles with NVRTC and keeps the result on disk, found by the source and the architecture.
    Raises EnvironmentProblem for a device that the kernels were not written for.
    """

    def __init__(self, xp):
        found = xp.cuda.Device().compute_capability
        if int(found) < OLDEST_DEVICE:
            raise EnvironmentProblem(
                f"this GPU has compute capability {found[:-1]}.{found[-1]}, and the kernels of "
                "mpipar need 8.0 (A100) or newer: type --kernels plain and leave --gemm out, or "
                "take another GPU")
        self._xp = xp
        self._functions = {}

    def launch(self, file, name, grid, block, arguments, shared_bytes=0):
        """Queue one kernel on the current stream.

        file, name: as in `kernels.KERNELS`. arguments: arrays (their memory, whatever their
        strides), ints and floats, in the kernel's order. shared_bytes: dynamic shared memory.
        """
        if name not in self._functions:
            self._functions[name] = self._compile(file, name, shared_bytes)
        values = tuple(kernels.SCALARS.get(type(one), lambda same: same)(one) for one in arguments)
        self._functions[name](grid, block, values, shared_mem=shared_bytes)

    def _compile(self, file, name, shared_bytes):
        module = self._xp.RawModule(code=kernels.source(file), options=("--std=c++17",),
                                    name_expressions=(name,))
        function = module.get_function(name)
        if shared_bytes > PLAIN_SHARED_BYTES:
            function.max_dynamic_shared_size_bytes = shared_bytes
        return function


def num_processors(xp):
    """Return how many streaming multiprocessors the current device has."""
    return int(xp.cuda.Device().attributes["MultiProcessorCount"])
