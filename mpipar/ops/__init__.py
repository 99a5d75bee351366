"""Array functions of the layers, in four implementations: NumPy, Numba, CuPy and shapes only.

Layers and models do arithmetic only through the object that `make` returns. So the same layer runs
on a CPU, on a GPU, and without any numbers at all for the cost model.
"""

from mpipar.errors import UsageError
from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cupy_fused import FusedOps
from mpipar.ops.cupy_ops import CupyOps
from mpipar.ops.mixed_ops import DTYPES, MixedOps
from mpipar.ops.numba_ops import NumbaOps
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.shape_ops import ShapeOps

__all__ = ["KERNELS", "make", "make_for", "problems", "shapes_for"]

DEVICES = ("cpu", "cuda", "shapes")
KERNELS = {"cpu": ("numpy", "numba"), "cuda": ("fused", "plain")}  # the first is the default


def make(device, dtype, recorder=None, kernels=None, gemm="blas", tf32=False, host_rank=0):
    """Return the array functions of one device: "cpu", "cuda" or "shapes".

    dtype: the type of weights and activations. Gradients and sums have it too for "float32" and
    "float64"; with "bfloat16" and "float16" they stay in float32.
    recorder: has `phase`, under which the shapes book their FLOPs; the other two ignore it.
    kernels: what runs the elementwise chains, one of KERNELS; None chooses. "shapes" count the
    bytes of "fused" kernels if that is asked for, else those of NumPy. If a kind of the CPU is
    named, they count its scratch too. gemm, tf32, host_rank: how "cuda" multiplies and on which
    GPU, as in `CupyOps`.

    Raises UsageError for any other device. Raises EnvironmentProblem when "cuda" is asked for
    without CuPy or a usable GPU, or "numba" without Numba.
    """
    if dtype in DTYPES:
        return MixedOps(make(device, "float32", recorder, kernels, gemm, tf32, host_rank), dtype)
    if device == "cpu":
        return NumbaOps(dtype) if kernels == "numba" else NumpyOps(dtype)
    if device == "cuda":
        if (kernels or _default(device, dtype)) == "fused":
            return FusedOps(gemm, tf32, host_rank)
        return CupyOps(dtype, gemm, tf32, host_rank)
    if device != "shapes":
        raise UsageError(f"device {device!r} does not exist; use one of {', '.join(DEVICES)}")
    return ShapeOps(dtype, recorder, FusedOps if kernels == "fused" else ArrayOps,
                    keeps_scratch=kernels in KERNELS["cpu"])


def _default(device, dtype):
    """Return the kernels that a device uses by default; there are no fused ones for float64."""
    return "plain" if (device, dtype) == ("cuda", "float64") else KERNELS[device][0]


def make_for(run, host_rank=0):
    """Return the array functions that the settings of a run (a RunConfig) ask for."""
    return make(run.device, run.dtype, None, run.kernels, run.gemm, run.tf32, host_rank)


def shapes_for(run, recorder):
    """Return the array functions on shapes that predict the bytes of a run (a RunConfig)."""
    return make("shapes", run.dtype, recorder, run.kernels or _default(run.device, run.dtype))


def kernel_problems(config):
    """Return, as texts, what is wrong with the choice of device and kernels."""
    run, found = config.run, []
    own = KERNELS[run.device]
    if run.kernels and run.kernels not in own:
        found.append(f"--kernels {run.kernels}: is not for --device {run.device}, which has "
                     f"{' and '.join(own)}; use one of them, or leave it out")
    if run.kernels == "fused" and run.dtype == "float64":
        found.append("--kernels fused: no kernel of mpipar computes in float64; leave it out, or "
                     "use --dtype float32")
    gemm = f"--gemm {run.gemm}"
    for shown, given in ((gemm, run.gemm != "blas"), ("--tf32", run.tf32)):
        if given and run.device == "cpu":
            found.append(f"{shown}: is for products on a GPU; add --device cuda, or leave it out")
    if run.gemm != "blas" and run.dtype == "float64":
        found.append(f"{gemm}: no kernel of mpipar computes in float64; leave it out, or use "
                     "--dtype float32")
    if run.tf32 and run.dtype != "float32":
        found.append(f"--tf32: rounds float32 operands, and --dtype is {run.dtype}; leave it out, "
                     "or use --dtype float32")
    if run.tf32 and run.gemm != "blas":
        found.append(f"--tf32 and {gemm}: TF32 is a mode of cuBLAS; give one of them")
    return found
