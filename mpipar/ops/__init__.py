"""Array functions of the layers, in four implementations: NumPy, Numba, CuPy and shapes only.

Layers and models do arithmetic only through the object that `make` returns. The same layer
therefore runs on a CPU, on a GPU, and without any numbers at all where only the shapes count.
"""

from typing import Protocol

from mpipar.errors import UsageError
from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cuda.fused import FusedOps
from mpipar.ops.cupy_ops import CupyOps
from mpipar.ops.functions import Ops
from mpipar.ops.mixed_ops import DTYPES, MixedOps
from mpipar.ops.numba_ops import NumbaOps
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.shape_ops import Recording, ShapeOps

__all__ = ["KERNELS", "make", "make_for", "shapes_for"]

KERNELS = {"cpu": ("numpy", "numba"), "cuda": ("fused", "plain")}  # the first is the default


class Settings(Protocol):
    """What the settings of a run say about its array functions."""

    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kernels(self) -> str | None: ...
    @property
    def gemm(self) -> str: ...


def make(
    device: str,
    dtype: str,
    recorder: Recording | None = None,
    kernels: str | None = None,
    gemm: str = "blas",
    host_rank: int = 0,
) -> Ops:
    """Return the array functions of one device: "cpu", "cuda" or "shapes".

    dtype: the type of weights and activations. Gradients and sums have it too for "float32" and
    "float64"; with "bfloat16" and "float16" they stay in float32.
    recorder: its `phase` is where "shapes" books FLOPs; the other devices ignore it.
    kernels: what runs the elementwise chains, one of KERNELS; None chooses. "shapes" count the
    bytes of a GPU's kernels if these are given, else those of NumPy, and their scratch as well if a
    kind of the CPU is named. gemm, host_rank: how "cuda" multiplies and on which GPU, as in
    `CupyOps`.

    Raises UsageError for any other device, and EnvironmentProblem for "cuda" without CuPy or a
    usable GPU, or "numba" without Numba.
    """
    if dtype in DTYPES:
        return MixedOps(make(device, "float32", recorder, kernels, gemm, host_rank), dtype)
    if device == "cpu":
        return NumbaOps(dtype) if kernels == "numba" else NumpyOps(dtype)
    if device == "cuda":
        if (kernels or _default(device, dtype)) == "fused":
            return FusedOps(gemm, host_rank)
        return CupyOps(dtype, gemm, host_rank)
    if device != "shapes":
        raise UsageError(f"device {device!r} does not exist; use one of cpu, cuda, shapes")
    like = FusedOps if kernels == "fused" else CupyOps if kernels == "plain" else ArrayOps
    return ShapeOps(dtype, recorder, like, keeps_scratch=kernels in KERNELS["cpu"])


def _default(device: str, dtype: str) -> str:
    """Return the kernels that a device uses by default; there are no fused ones for float64."""
    return "plain" if (device, dtype) == ("cuda", "float64") else KERNELS[device][0]


def make_for(run: Settings, host_rank: int = 0) -> Ops:
    """Return the array functions that the settings of a run ask for."""
    return make(run.device, run.dtype, None, run.kernels, run.gemm, host_rank)


def shapes_for(run: Settings, recorder: Recording | None) -> Ops:
    """Return the array functions on shapes that predict the bytes of a run."""
    return make("shapes", run.dtype, recorder, run.kernels or _default(run.device, run.dtype))
