"""Every implementation has the functions of `ArrayOps`, with its signatures, and no others.

If one cannot be had, an error names what is missing.
"""

import inspect
import sys
import types
from inspect import signature

import numpy as np
import pytest

from mpipar.errors import EXIT_ENVIRONMENT, EnvironmentProblem
from mpipar.interconnect import job
from mpipar.interconnect.arguments import Arguments
from mpipar.ops import cupy_ops, make
from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cuda.fused import FusedOps
from mpipar.ops.cuda.kernels import Loader
from mpipar.ops.cupy_ops import CupyOps
from mpipar.ops.functions import DECLARED, FUNCTIONS, MEMORY, Ops
from mpipar.ops.mixed_ops import MixedOps
from mpipar.ops.numba_ops import NumbaOps
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.shape_ops import ShapeOps
from mpipar.ops.timed_ops import TimedOps

IMPLEMENTATIONS = (
    ArrayOps,
    Ops,
    NumpyOps,
    NumbaOps,
    CupyOps,
    FusedOps,
    ShapeOps,
    MixedOps,
    TimedOps,
)


def signature_of(function):
    """(parameters, type of the result) as its line says: other `out` are the driver's of tiles."""
    found = signature(function, eval_str=True)
    parameters = dict(found.parameters)
    if "out" not in [part.name for part in DECLARED[function.__name__].takes]:
        parameters.pop("out", None)
    return list(parameters.values()), found.return_annotation


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_has_these_functions_with_the_signatures_of_the_formulas(
    implementation,
):
    """Types, order, defaults and the result."""
    public = {
        name
        for name in dir(implementation)
        if not name.startswith("_") and inspect.isfunction(getattr(implementation, name))
    }
    assert public - {"reset_peak"} == {*FUNCTIONS, *MEMORY}
    for name in public & DECLARED.keys():
        wanted = signature_of(getattr(ArrayOps, name))
        assert signature_of(getattr(implementation, name)) == wanted, name


def test_a_line_names_the_arguments_of_its_signature():
    for name, function in FUNCTIONS.items():
        _, *found = [one.name for one in signature_of(getattr(ArrayOps, name))[0]]
        assert found == [part.name for part in function.takes], name


def test_a_line_says_what_it_reads_and_writes():
    """The driver relies on this: a function of rows has rows, and makes all results or none."""
    tiled = [name for name, one in vars(NumpyOps).items() if hasattr(one, "__wrapped__")]
    assert {"gelu_forward", "layernorm_forward", "top_forward", "adamw_step"} < {*tiled}
    for name in tiled:
        function = FUNCTIONS[name]
        assert any(part.by_row for part in function.takes), name
        assert len(function.makes) in (0, len(function.gives)), name


def test_a_function_without_a_formula_is_named():
    with pytest.raises(TypeError, match="Ops has no gelu_forward"):
        Ops().gelu_forward(1)


def test_arguments_that_do_not_fit_a_line_are_refused():
    ops = make("cpu", "float32")
    for call in (
        ops.gelu_forward,
        lambda: ops.gelu_forward(1, 2),
        lambda: ops.gelu_forward(y=1),
        lambda: ops.gelu_forward(1, x=1),
    ):
        with pytest.raises(TypeError, match=r"gelu_forward takes x\[\.\.\] -> y\[\.\.\]"):
            call()


# Choosing a device.


def test_cuda_without_cupy_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # any import of it fails now
    with pytest.raises(EnvironmentProblem, match=r"pip install '\.\[cuda\]'") as caught:
        make("cuda", "float32")
    assert "--device cpu" in str(caught.value)
    assert caught.value.exit_code == EXIT_ENVIRONMENT


def gpu(ones, capability="90", used=None):
    """A module cupy as far as it is tried out."""
    device = types.SimpleNamespace(compute_capability=capability)
    device.use = lambda: None if used is None else used.append("use")
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 4)
    cuda = types.SimpleNamespace(
        runtime=runtime,
        Device=lambda number=0: (used.append(number) if used is not None else None, device)[1],
    )
    return types.SimpleNamespace(__version__="14.2.0", cuda=cuda, ones=ones)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected"),
        ImportError("libcublas.so.13: cannot open shared object file"),
    ],
    ids=["driver", "library"],
)
def test_cuda_without_a_gpu_says_what_to_type(monkeypatch, error):
    def ones(shape):
        raise error

    monkeypatch.setitem(sys.modules, "cupy", gpu(ones))
    with pytest.raises(EnvironmentProblem, match=str(error)) as caught:
        make("cuda", "float32")
    assert "--device cpu" in str(caught.value)


def test_nothing_is_computed_on_a_gpu_that_is_another_rank_s(monkeypatch):
    """A first use of a GPU leaves hundreds of MiB on it."""
    done = []
    monkeypatch.setitem(
        sys.modules, "cupy", gpu(lambda shape: done.append("compute") or np.ones(shape), used=done)
    )
    cupy_ops._usable_cupy(6)
    assert done == [2, "use", "compute"]


def test_a_cupy_without_bfloat16_is_too_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(__version__="13.6.0"))
    with pytest.raises(EnvironmentProblem, match=r"CuPy 14 .* 13\.6\.0 .*'\.\[cuda\]'"):
        make("cuda", "float32")


@pytest.mark.parametrize(("capability", "fits"), [("75", False), ("80", True), ("120", True)])
def test_a_device_that_the_kernels_are_too_new_for_is_named(capability, fits):
    cupy = gpu(np.ones, capability)
    Loader(cupy, CupyOps.oldest_device)  # of the plain functions, which messages take
    if fits:
        Loader(cupy, FusedOps.oldest_device)
    else:
        with pytest.raises(EnvironmentProblem, match=r"7\.5, .* --kernels plain"):
            Loader(cupy, FusedOps.oldest_device)


def test_messages_need_no_gpu_that_the_kernels_need(monkeypatch):
    monkeypatch.setattr(job.ops_module, "make", lambda *words, **named: named["kernels"])
    assert job.make_ops(Arguments(transport="staged"), 0) == "plain"
