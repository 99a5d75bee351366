"""Choosing a device: an error names what is missing, and CuPy computes what NumPy does."""

import sys
import types

import fake_cupy
import numpy as np
import pytest
from helpers import assert_close
from ops_cases import LARGE, call_every_op, plain

from mpipar.errors import EXIT_ENVIRONMENT, EnvironmentProblem
from mpipar.interconnect import job
from mpipar.interconnect.arguments import Arguments
from mpipar.ops import make
from mpipar.ops.cuda.kernels import Loader


def test_cuda_without_cupy_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # any import of it fails now
    with pytest.raises(EnvironmentProblem, match=r"pip install '\.\[cuda\]'") as caught:
        make("cuda", "float32")
    assert "--device cpu" in str(caught.value)
    assert caught.value.exit_code == EXIT_ENVIRONMENT


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected"),
        ImportError("libcublas.so.13: cannot open shared object file"),
    ],
    ids=["driver", "library"],
)
def test_cuda_without_a_gpu_says_what_to_type(monkeypatch, error):
    class Array:
        def __matmul__(self, other):
            raise error

    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    monkeypatch.setattr(fake_cupy, "ones", lambda shape: Array())
    with pytest.raises(EnvironmentProblem, match=str(error)) as caught:
        make("cuda", "float32")
    assert "--device cpu" in str(caught.value)


def test_nothing_is_computed_on_a_gpu_that_is_another_rank_s(monkeypatch):
    """A first use of a GPU leaves hundreds of MiB on it."""
    done, ones = [], fake_cupy.ones
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    monkeypatch.setattr(fake_cupy, "ones", lambda shape: done.append("compute") or ones(shape))
    monkeypatch.setattr(fake_cupy.cuda.runtime, "getDeviceCount", lambda: 4)
    monkeypatch.setattr(
        fake_cupy.cuda,
        "Device",
        lambda number=0: types.SimpleNamespace(
            use=lambda: done.append(number), compute_capability="90"
        ),
    )
    make("cuda", "bfloat16", host_rank=6)
    assert done == [2, "compute"]


def test_a_cupy_without_bfloat16_is_too_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(__version__="13.6.0"))
    with pytest.raises(EnvironmentProblem, match=r"CuPy 14 .* 13\.6\.0 .*'\.\[cuda\]'"):
        make("cuda", "float32")


@pytest.mark.parametrize(("capability", "fits"), [("75", False), ("80", True), ("120", True)])
def test_a_device_that_the_kernels_are_too_new_for_is_named(capability, fits):
    device = types.SimpleNamespace(compute_capability=capability)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=lambda: device))
    if fits:
        Loader(cupy)
    else:
        with pytest.raises(EnvironmentProblem, match=r"7\.5, .* --kernels plain"):
            Loader(cupy)


def test_messages_need_no_gpu_that_the_kernels_need(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    monkeypatch.setattr(
        fake_cupy.cuda,
        "Device",
        lambda number=0: types.SimpleNamespace(use=lambda: None, compute_capability="70"),
    )
    with pytest.raises(EnvironmentProblem, match=r"7\.0"):
        make("cuda", "float32")
    ops = job.make_ops(Arguments(transport="staged"), 0)
    assert ops.to_host(ops.zeros((2,))).tolist() == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["increasing", "shuffled"])
@pytest.mark.parametrize(("dtype", "tol"), [("float64", 1e-11), ("float32", 2e-5)])
def test_cupy_equals_plain(dtype, tol, kind):
    ops = make("cuda", dtype)
    expected = call_every_op(plain("float64"), LARGE, kind)
    for name, value in call_every_op(ops, LARGE, kind).items():
        on_host = value if isinstance(value, float) else ops.to_host(value)
        assert isinstance(on_host, float | np.ndarray), name
        assert_close(on_host, expected[name], tol, name)
