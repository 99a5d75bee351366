"""The array functions for the CPU with compiled elementwise chains: `--kernels numba`.

Products, attention's tiles and embeddings are those of `numpy_ops`. Results differ from NumPy's in
the last bits (order of sums, exp), so these functions are used only on request.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.cache import cache_folder
from mpipar.errors import EnvironmentProblem
from mpipar.ops.arrays import AdamWStep
from mpipar.ops.functions import by_kernel
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.signature import Array, Function

# Functions that have a kernel of the same name in `numba_kernels`, which is one pass over memory.
CHAINS = (
    "gelu_forward",
    "gelu_backward_input",
    "swiglu_forward",
    "swiglu_backward_input",
    "rmsnorm_forward",
    "rmsnorm_backward_input",
    "rmsnorm_backward_weight",
    "layernorm_forward",
    "layernorm_backward_input",
    "layernorm_backward_weight",
)


class NumbaOps(NumpyOps):
    """The array functions of `NumpyOps`, with one pass over memory for each elementwise chain.

    The chains run on one thread, because ranks, not threads, share the cores.
    Raises EnvironmentProblem when Numba is missing.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        super().__init__(dtype)
        self.kernels = _load_kernels()

    vars().update({name: by_kernel(name) for name in CHAINS})

    def _run(
        self,
        function: Function,
        arguments: Sequence[Any],
        results: Sequence[Array],
        inner: Sequence[int | None],
    ) -> None:
        """Start the kernel of a function; all leading dimensions are merged into one."""
        values = [
            x
            if x is None or (kept is None and isinstance(x, np.ndarray))
            else self.scalar(x)
            if kept is None
            else x.reshape(-1, *x.shape[x.ndim - kept :])
            for x, kept in zip((*arguments, *results), inner, strict=True)
        ]
        getattr(self.kernels, function.name)(*values)

    def _rotate(self, x: Array, cos: Array, sin: Array) -> None:
        assert x.shape[-1] == 2 * cos.shape[-1], (x.shape, cos.shape)
        whole = *x.shape[:2], cos.shape[-1]
        self.kernels.rotate(x, np.broadcast_to(cos, whole), np.broadcast_to(sin, whole))

    def _softmax_tile(self, rows: Array, at: slice, keys: int) -> tuple[Array, Array]:
        top = rows[:, at, :keys].max(axis=-1, initial=self.neg_max)
        total = np.empty_like(top)
        self.kernels.softmax(rows, top, total, at.start, keys)
        return top, total

    def _softmax_backward_tile(self, probs: Array, at: slice, dprobs: Array) -> None:
        self.kernels.softmax_backward(dprobs, probs, at.start)

    def _exp_sums(self, valid: Array, top: Array) -> Array:
        total = np.empty(len(valid), self.dtype)
        self.kernels.exp_sum(valid, top, total)
        return total

    def _scaled_softmax(self, valid: Array, sums: Array, scale: float) -> None:
        self.kernels.scaled_softmax(valid, sums, self.scalar(scale))

    def adamw_step(
        self, data: Array, grad: Array, m: Array, v: Array, by: AdamWStep, copy: Array | None = None
    ) -> None:
        """Update data, m, v in place as `ArrayOps.adamw_step` does."""
        root, rate = (1.0 - by.beta2**by.step) ** -0.5, by.lr / (1.0 - by.beta1**by.step)
        decay = 1.0 - by.lr * by.weight_decay
        self.kernels.adamw_step(
            data, grad, m, v, *map(self.scalar, (by.beta1, by.beta2, by.eps, decay, root, rate))
        )
        if copy is not None:
            self.copy(copy, data)


def _load_kernels() -> ModuleType:
    """Return the module of the kernels. Each compiles at its first call, in a second or less.

    Compiled code is cached in NUMBA_CACHE_DIR, or else in the user's cache folder. If that cannot
    be written, it is not cached.
    """
    try:
        import llvmlite.binding as llvm
        from numba import config
    except ImportError:
        raise EnvironmentProblem(
            "--kernels numba: Numba is not installed: pip install '.[cpu]', or use --kernels numpy"
        ) from None
    settings: Any = config
    if not settings.CACHE_DIR:
        settings.CACHE_DIR = str(cache_folder("numba") or "")
    features = llvm.get_host_cpu_features()
    if not settings.CPU_FEATURES and features.get("avx512f"):
        # LLVM uses half of these vectors, as for processors that slow down with full ones. Here the
        # products use full ones anyway.
        settings.CPU_FEATURES = features.flatten() + ",-prefer-256-bit"
    return importlib.import_module("mpipar.ops.numba_kernels")
