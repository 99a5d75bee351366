"""Array functions of the layers, in three implementations: NumPy, CuPy and shapes only.

Layers and models do arithmetic only through the object that `make` returns, so the same layer runs
on a CPU, on a GPU, and without any numbers at all for the cost model.
"""

from mpipar.ops.cupy_ops import CupyOps
from mpipar.ops.mixed_ops import DTYPES, MixedOps
from mpipar.ops.numba_ops import NumbaOps
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.shape_ops import ShapeOps

__all__ = ["make", "make_for"]


def make(device, dtype, recorder=None, kernels="numpy"):
    """Return the array functions of one device: "cpu", "cuda" or "shapes".

    dtype: of weights and activations. Of gradients and sums too for "float32" and "float64";
    "bfloat16" and "float16" keep those in float32.
    recorder: has `phase`, under which the shapes book their FLOPs; the other two ignore it.
    kernels: "numpy" or "numba", what runs the elementwise chains on "cpu".
    Raises EnvironmentProblem when "cuda" is asked for and CuPy or a usable GPU is missing, or
    "numba" and Numba is.
    """
    if dtype in DTYPES:
        return MixedOps(make(device, "float32", recorder, kernels), dtype)
    if device == "cpu":
        return NumbaOps(dtype) if kernels == "numba" else NumpyOps(dtype)
    if device == "cuda":
        return CupyOps(dtype)
    assert device == "shapes", f"device {device!r} is none of 'cpu', 'cuda', 'shapes'"
    return ShapeOps(dtype, recorder)


def make_for(run):
    """Return the array functions that the settings of a run (a RunConfig) ask for."""
    return make(run.device, run.dtype, kernels=run.kernels)
