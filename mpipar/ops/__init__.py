"""Array functions of the layers, in three implementations: NumPy, CuPy and shapes only.

Layers and models do arithmetic only through the object that `make` returns, so the same layer runs
on a CPU, on a GPU, and without any numbers at all for the cost model.
"""

from mpipar.ops.cupy_ops import CupyOps
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.shape_ops import ShapeOps

__all__ = ["make"]


def make(device, dtype, recorder=None):
    """Return the array functions of one device: "cpu", "cuda" or "shapes".

    dtype: "float32" or "float64", the type of weights, activations and gradients.
    recorder: has `phase`, under which the shapes book their FLOPs; the other two ignore it.
    Raises EnvironmentProblem when "cuda" is asked for and CuPy or a usable GPU is missing.
    """
    if device == "cpu":
        return NumpyOps(dtype)
    if device == "cuda":
        return CupyOps(dtype)
    assert device == "shapes", f"device {device!r} is none of 'cpu', 'cuda', 'shapes'"
    return ShapeOps(dtype, recorder)
