"""CuPy as a fixture for the whole session: the stand-in on the CPU, and the real one on a GPU."""

import importlib
import sys
from types import SimpleNamespace

import fake_cuda_tile
import fake_cupy
import pytest


def put_in(monkeypatch):
    """Let `import cupy` and `import cuda.tile` find the stand-ins."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(tile=fake_cuda_tile))
    monkeypatch.setitem(sys.modules, "cuda.tile", fake_cuda_tile)


@pytest.fixture(name="cupy", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def cupy_or_stand_in(request, monkeypatch):
    """The module cupy, real or stand-in; kernels on the CPU need the mark shim."""
    if request.param == "gpu":
        if "cuda-tile" in request.node.callspec.params.values():
            pytest.importorskip("cuda.tile")
        return importlib.import_module("cupy")
    put_in(monkeypatch)
    return fake_cupy
