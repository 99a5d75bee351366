"""Choosing a device: what is missing is said, and CuPy computes what NumPy does."""

import sys
import types

import numpy as np
import pytest
from helpers import assert_close
from ops_cases import LARGE, call_every_op, plain

from mpipar.errors import EXIT_ENVIRONMENT, EnvironmentProblem
from mpipar.ops import make


def test_unknown_device_is_a_bug():
    with pytest.raises(AssertionError, match="gpu"):
        make("gpu", "float32")


def test_cuda_without_cupy_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # any import of it fails now
    with pytest.raises(EnvironmentProblem, match=r"pip install '\.\[cuda\]'") as caught:
        make("cuda", "float32")
    assert "--device cpu" in str(caught.value)
    assert caught.value.exit_code == EXIT_ENVIRONMENT


def test_cuda_without_a_gpu_says_what_to_type(monkeypatch):
    def ones(count):
        raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ones=ones))
    with pytest.raises(EnvironmentProblem, match="cudaErrorNoDevice") as caught:
        make("cuda", "float32")
    assert "--device cpu" in str(caught.value)


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
