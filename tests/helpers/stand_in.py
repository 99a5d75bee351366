"""CuPy for tests: the real one as a fixture, and the stand-in below NCCL and between ranks."""

import importlib
import sys
from types import SimpleNamespace

import fake_cupy
import fake_streams
import pytest


def put_in(monkeypatch):
    """Let `import cupy` find the stand-in."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    fake_streams.Stream.queued.clear()  # what a broken twin has left


def put_in_nccl(monkeypatch, pci_bus_id=None):
    """Also NCCL, which MPI plays in a thread, and for each rank a GPU with this or its own id."""
    import fake_nccl

    put_in(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", fake_nccl)
    monkeypatch.setattr(fake_cupy.cuda, "nccl", fake_nccl, raising=False)
    own = {"pci_bus_id": pci_bus_id or f"0000:{fake_nccl.BOOT.rank:02X}:00.0"}
    device = SimpleNamespace(**vars(fake_cupy.cuda.Device()) | own)
    monkeypatch.setattr(fake_cupy.cuda, "Device", lambda number=0: device)


@pytest.fixture(name="cupy", params=[pytest.param("gpu", marks=pytest.mark.gpu)])
def real_cupy():
    """The module cupy, on a GPU or on the CUDA machine of tests/elsewhere/cuda_machine."""
    return importlib.import_module("cupy")
