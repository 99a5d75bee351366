"""Helpers for the tests of fused kernels: places to run, poisoned results, relative errors."""

import ml_dtypes
import numpy as np
import pytest
from cuda_host import run_kernel, run_sanitized

from mpipar.ops.cuda.kernels import Loader

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Largest relative error: one rounding of the result; for float32 also of a few steps before it.
BOUNDS = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}


class Poisoned:
    """NumPy whose empty arrays hold NaN, so that an element that no kernel writes shows."""

    ascontiguousarray, asarray = map(staticmethod, (np.ascontiguousarray, np.asarray))

    zeros = staticmethod(np.zeros)

    @staticmethod
    def empty(shape, dtype):
        return np.full(shape, np.nan, dtype)


class HostLoader:
    """Starts kernels on the CPU, as `loader.Loader` does on a GPU.

    order: 1 or -1, the order of threads. sanitizer: run each kernel under it as well, with `edit`
    made to the file `edited`; `reports` holds (kernel, exit code, text).
    """

    def __init__(self, order=1, sanitizer=None, edited=None, edit=None):
        self.order, self.sanitizer, self.edited, self.edit = order, sanitizer, edited, edit
        self.reports = []

    def launch(self, file, name, grid, block, arguments, shared_bytes=0):
        edit = self.edit if file == self.edited else None
        if self.sanitizer is not None:
            self.reports.append(
                (
                    name,
                    *run_sanitized(
                        self.sanitizer, file, name, grid, block, arguments, shared_bytes, edit=edit
                    ),
                )
            )
            edit = None
        run_kernel(file, name, grid, block, arguments, shared_bytes, order=self.order, edit=edit)


def hosts():
    """(xp, loader) of each place where kernels can run."""
    return [
        pytest.param("forwards", marks=pytest.mark.shim),
        pytest.param("backwards", marks=pytest.mark.shim),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]


def place(name):
    """Return (xp, loader, function that makes a device array, function that makes a host array)."""
    if name == "gpu":
        import cupy

        return cupy, Loader(cupy), cupy.asarray, cupy.asnumpy
    return Poisoned, HostLoader(1 if name == "forwards" else -1), np.array, np.asarray


def relative(got, expected):
    """Norm of the error relative to the norm of the expected result; NaN counts as infinite."""
    difference = np.asarray(got).astype(np.float64) - expected
    error = np.linalg.norm(difference) / max(np.linalg.norm(expected), 1e-30)
    return np.inf if np.isnan(error) else error
