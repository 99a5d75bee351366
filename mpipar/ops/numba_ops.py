"""The array functions for the CPU with the elementwise chains compiled: `--kernels numba`.

Products, attention's tiles and embeddings are those of `numpy_ops`. Results differ from NumPy's in
the last bits (order of sums, exp), so nobody gets these functions without asking for them.
"""

import importlib

import numpy as np

from mpipar.errors import EnvironmentProblem
from mpipar.files.cache import cache_folder
from mpipar.ops.array_attention import LOWEST
from mpipar.ops.array_ops import as_rows
from mpipar.ops.numpy_attention import log_of_sum
from mpipar.ops.numpy_ops import NumpyOps


class NumbaOps(NumpyOps):
    """The array functions of `NumpyOps`, with one pass over memory for each elementwise chain.

    The chains run on one thread, because ranks, not threads, share the cores.
    Raises EnvironmentProblem when Numba is missing.
    """

    def __init__(self, dtype):
        super().__init__(dtype)
        self.kernels = _load_kernels()

    def gelu_forward(self, x):
        """Return the tanh form of GELU of x."""
        y = np.empty(x.shape, self.dtype)
        self.kernels.gelu_forward(x.reshape(-1), y.reshape(-1))
        return y

    def bias_gelu_forward(self, x, b):
        """Add b (M,) to the freshly made x (..., M) in place and return GELU of the sum."""
        y = np.empty(x.shape, self.dtype)
        self.kernels.bias_gelu_forward(as_rows(x), b, as_rows(y))
        return y

    def gelu_backward_input(self, dy, x):
        """Return dx = dy GELU'(x)."""
        dx = np.empty(x.shape, self.dtype)
        self.kernels.gelu_backward_input(dy.reshape(-1), x.reshape(-1), dx.reshape(-1))
        return dx

    def swiglu_forward(self, h):
        """Return silu(gate) up (..., F) of h (..., 2, F), which is gate and up."""
        y = np.empty((*h.shape[:-2], h.shape[-1]), self.dtype)
        self.kernels.swiglu_forward(h.reshape(-1, *h.shape[-2:]), as_rows(y))
        return y

    def swiglu_backward_input(self, dy, h):
        """Return (dh (..., 2, F), and silu(gate) up (..., F) once more)."""
        dh, y = np.empty(h.shape, self.dtype), np.empty(dy.shape, self.dtype)
        pairs = -1, *h.shape[-2:]
        self.kernels.swiglu_backward_input(
            as_rows(dy), h.reshape(pairs), dh.reshape(pairs), as_rows(y))
        return dh, y

    def _rotate(self, x, cos, sin):
        assert x.shape[-1] == 2 * cos.shape[-1], (x.shape, cos.shape)
        whole = *x.shape[:2], cos.shape[-1]
        self.kernels.rotate(x, np.broadcast_to(cos, whole), np.broadcast_to(sin, whole))

    def rmsnorm_forward(self, x, w, eps):
        """Return (y, rstd): x (..., D) times rstd = 1 / sqrt(mean(x^2) + eps), scaled; rstd (...).

        Zhang and Sennrich 2019, arXiv 1910.07467.
        """
        y, rstd = np.empty(x.shape, self.dtype), np.empty(x.shape[:-1], self.dtype)
        self.kernels.rmsnorm_forward(
            as_rows(x), w, self.scalar(eps), as_rows(y), rstd.reshape(-1))
        return y, rstd

    def rmsnorm_backward_input(self, dy, x, w, rstd):
        """Return dx = rstd (g - xhat mean(g xhat)), where g = dy w and xhat = x rstd."""
        dx = np.empty(x.shape, self.dtype)
        self.kernels.rmsnorm_backward_input(
            as_rows(dy), as_rows(x), w, rstd.reshape(-1), as_rows(dx))
        return dx

    def rmsnorm_backward_weight(self, dy, x, rstd, dw):
        """Add the sum of dy xhat to dw (D,)."""
        self.kernels.rmsnorm_backward_weight(as_rows(dy), as_rows(x), rstd.reshape(-1), dw)

    def layernorm_forward(self, x, w, b, eps):
        """Return (y, mean, rstd): x (..., D) normalised and scaled, mean and rstd (...)."""
        y = np.empty(x.shape, self.dtype)
        mean, rstd = np.empty(x.shape[:-1], self.dtype), np.empty(x.shape[:-1], self.dtype)
        self.kernels.layernorm_forward(
            as_rows(x), w, b, self.scalar(eps), as_rows(y), mean.reshape(-1), rstd.reshape(-1))
        return y, mean, rstd

    def layernorm_backward_input(self, dy, x, w, mean, rstd):
        """Return dx = rstd (g - mean(g) - xhat mean(g xhat)), where g = dy w."""
        dx = np.empty(x.shape, self.dtype)
        self.kernels.layernorm_backward_input(
            as_rows(dy), as_rows(x), w, mean.reshape(-1), rstd.reshape(-1), as_rows(dx))
        return dx

    def layernorm_backward_weight(self, dy, x, mean, rstd, dw, db):
        """Add the sum of dy xhat to dw (D,) and the sum of dy to db (D,)."""
        self.kernels.layernorm_backward_weight(
            as_rows(dy), as_rows(x), mean.reshape(-1), rstd.reshape(-1), dw, db)

    def _softmax_tile(self, rows, at, keys):
        top = rows[:, at, :keys].max(axis=-1, initial=LOWEST)
        total = np.empty_like(top)
        self.kernels.softmax(rows, top, total, at.start, keys)
        return log_of_sum(top, total)

    def _softmax_backward_tile(self, probs, at, dprobs):
        self.kernels.softmax_backward(dprobs, probs, at.start)

    def _exp_sums(self, valid, top):
        total = np.empty(len(valid), self.dtype)
        self.kernels.exp_sum(valid, top, total)
        return total

    def _scaled_softmax(self, valid, lse, scale):
        self.kernels.scaled_softmax(valid, lse, self.scalar(scale))

    def square_sum(self, x):
        """Return the sum of squares of x as a host float, accumulated in float64."""
        return self.kernels.square_sum(x.reshape(-1))

    def adamw_step(
        self, data, grad, m, v, *, lr, beta1, beta2, eps, weight_decay, step, copy=None
    ):
        """Update data, m, v in place as `ArrayOps.adamw_step` does; step counts from 1."""
        root, rate = (1.0 - beta2**step) ** -0.5, lr / (1.0 - beta1**step)
        decay = 1.0 - lr * weight_decay
        factors = map(self.scalar, (beta1, beta2, eps, decay, root, rate))
        self.kernels.adamw_step(data, grad, m, v, *factors)
        if copy is not None:
            self.copy(copy, data)


def _load_kernels():
    """Return the module of the kernels. Each compiles at its first call, in a second or less.

    Compiled code is kept in NUMBA_CACHE_DIR, or else in the user's cache folder. If that cannot be
    written, it is not kept.
    """
    try:
        import llvmlite.binding as llvm
        import numba
    except ImportError:
        raise EnvironmentProblem(
            "--kernels numba: Numba is not installed: pip install '.[cpu]', or use "
            "--kernels numpy") from None
    if not numba.config.CACHE_DIR:
        numba.config.CACHE_DIR = str(cache_folder("numba") or "")
    features = llvm.get_host_cpu_features()
    if not numba.config.CPU_FEATURES and features.get("avx512f"):
        # LLVM uses half of these vectors, as on processors that slow down for whole ones. Here the
        # products use whole ones anyway.
        numba.config.CPU_FEATURES = features.flatten() + ",-prefer-256-bit"
    return importlib.import_module("mpipar.ops.numba_kernels")
