"""The stand-in for CuPy's NCCL has the names and the arguments of the real one.

The CUDA machine of tests/elsewhere/cuda_machine runs all of CuPy that mpipar calls, but for NCCL.
That module needs a library of CUDA, so it is read as a file. Cython writes into it every name, and
the signature of every function.
"""

import functools
import inspect
import re
from pathlib import Path

import fake_nccl
import pytest

pytestmark = pytest.mark.cupy
CLASS = fake_nccl.NcclCommunicator
OWN = {"collective", "message"}  # of the stand-in alone
METHODS = {
    name for name, value in vars(CLASS).items() if callable(value) and not name.startswith("_")
} - OWN
FUNCTIONS = {"get_version", "get_unique_id", "groupStart", "groupEnd"}
CONSTANTS = {name for name in vars(fake_nccl) if name.startswith("NCCL_")}


@functools.cache
def module():
    """The text of CuPy's module."""
    import cupy

    folder = Path(cupy.__file__).parent.parent / "cupy_backends" / "cuda" / "libs"
    (path,) = folder.glob("nccl.*.so")
    return path.read_bytes()


def parameters(name):
    """The parameters of a function or method of CuPy, but self; None if there is no such name."""
    found = re.search(rb"\0(?:\w+ )?" + re.escape(name.encode()) + rb"\(([^\0\n]*)\)", module())
    if found is None:
        return None
    return [one for one in found[1].decode().split(", ") if one not in ("", "self")]


@pytest.mark.parametrize("name", sorted(METHODS | FUNCTIONS))
def test_a_call_takes_as_many_arguments_as_that_of_cupy(name):
    stand_in = getattr(CLASS, name, None) or getattr(fake_nccl, name)
    own = [one for one in inspect.signature(stand_in).parameters if one != "self"]
    real = parameters(f"NcclCommunicator.{name}" if name in METHODS else name)
    assert real is not None, f"CuPy has no {name}"
    assert len(own) == len(real), (own, real)


def test_constants_are_those_of_cupy():
    assert {name for name in CONSTANTS if b"\0%s\0" % name.encode() not in module()} == set()


def test_the_key_of_a_group_is_bytes():
    """It was a tuple of numbers before CuPy 14."""
    assert parameters("NcclCommunicator")[:3] == ["int ndev", "bytes commId", "int rank"]
    assert isinstance(fake_nccl.get_unique_id(), bytes)


def test_what_is_not_in_cupy_is_found():
    assert parameters("NcclCommunicator.sendAll") is None
    assert parameters("sendAll") is None
