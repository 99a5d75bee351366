"""The array functions for the CPU with compiled elementwise chains: `--kernels numba`.

Products, attention's tiles and embeddings are those of `numpy_ops`. Results differ from NumPy's in
the last bits (order of sums, exp), so these functions are used only on request.
"""

import importlib
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.cache import cache_folder
from mpipar.errors import EnvironmentProblem
from mpipar.ops.functions import FUNCTIONS
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.signature import Array, shape_of

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


def in_one_pass(name: str) -> Callable[..., Any]:
    """Return the method that runs the kernel of a function.

    The kernel receives the arguments, followed by arrays for the results, with all leading
    dimensions merged into one. The shape of the first argument determines those of the results.
    """
    function = FUNCTIONS[name]
    letters, made = function.takes[0].dims or (), [part.dims or () for part in function.gives]
    # For each argument and result: whether it is a number, and the number of its dimensions besides
    # the leading ones, None if it has no leading ones. They are computed once, because a call takes
    # microseconds.
    kinds = [
        (part.dims is None, len(part.dims or ()) - 1 if part.by_row else None)
        for part in (*function.takes, *function.gives)
    ]

    @wraps(getattr(NumpyOps, name))
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        if named or len(arguments) != len(function.takes):
            given = function.bind(arguments, named)
            arguments = tuple(given.get(part.name) for part in function.takes)
        shape = arguments[0].shape
        at = len(shape) - len(letters) + 1
        sizes = dict(zip(letters, (shape[:at], *shape[at:]), strict=True))
        results = tuple([np.empty(shape_of(dims, sizes), self.dtype) for dims in made])
        getattr(self.kernels, function.name)(
            *[
                self.scalar(x)
                if number
                else x
                if inner is None or x is None
                else x.reshape(-1, *x.shape[x.ndim - inner :])
                for x, (number, inner) in zip((*arguments, *results), kinds, strict=True)
            ]
        )
        return results if len(results) > 1 else results[0] if results else None

    return method


class NumbaOps(NumpyOps):
    """The array functions of `NumpyOps`, with one pass over memory for each elementwise chain.

    The chains run on one thread, because ranks, not threads, share the cores.
    Raises EnvironmentProblem when Numba is missing.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        super().__init__(dtype)
        self.kernels = _load_kernels()

    vars().update({name: in_one_pass(name) for name in CHAINS})

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

    def square_sum(self, x: Array) -> Any:
        """Return the sum of squares of x as a host float, accumulated in float64."""
        return float(self.kernels.square_sum(x.reshape(-1)))

    def adamw_step(
        self,
        data: Array,
        grad: Array,
        m: Array,
        v: Array,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        copy: Array | None = None,
    ) -> None:
        """Update data, m, v in place as `ArrayOps.adamw_step` does; step counts from 1."""
        root, rate = (1.0 - beta2**step) ** -0.5, lr / (1.0 - beta1**step)
        decay = 1.0 - lr * weight_decay
        factors = map(self.scalar, (beta1, beta2, eps, decay, root, rate))
        self.kernels.adamw_step(data, grad, m, v, *factors)
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
