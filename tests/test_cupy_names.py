"""Every name that the code takes from CuPy is in the real package, with fitting arguments.

Importing CuPy needs no GPU. Attributes of objects that only a device has are listed here, with what
they are.
"""

import functools
import importlib
import inspect
from pathlib import Path

import cupy_names
import fake_cublas
import fake_nccl
import numpy as np
import pytest
from cupy_names import Use
from helpers import REPOSITORY

pytestmark = pytest.mark.cupy

SOURCES = {str(path.relative_to(REPOSITORY)): path.read_text()
           for folder in ("mpipar", "bench")
           for path in sorted((REPOSITORY / folder).rglob("*.py"))}
# Files whose arrays may lie on a device: there a method of an array is one of CuPy's.
ARRAYS = [name for name in SOURCES if name.startswith("mpipar/ops/")
          and not any(word in name for word in ("numba", "numpy", "shape"))]
ARRAYS += ["mpipar/comm/device.py", "bench/kernels/gpu.py", "mpipar/comm/nccl.py"]
# These modules need a library of CUDA: they are read as files where it is missing.
LIBRARIES = {("cuda", "cublas"), ("cuda", "nccl")}
# Only an object of a device has these: keys of dictionaries are not attributes.
ON_OBJECTS = {("cuda", "Stream", "ptr"): "set when a stream is made, Stream.null has it",
              ("ndarray", "data", "ptr"): "of cuda.MemoryPointer"}


@functools.cache
def found(path):
    """The object of CuPy with this path; AttributeError, or ImportError without a library."""
    thing = importlib.import_module("cupy")
    for name in path:
        thing = getattr(thing, name)
    return thing


@functools.cache
def compiled(library):
    import cupy

    folder = Path(cupy.__file__).parent.parent / "cupy_backends" / "cuda" / "libs"
    (path,) = folder.glob(f"{library}.*.so")
    return cupy_names.Compiled(path)


def is_class(path):
    if path[:2] in LIBRARIES:
        return path[-1][0].isupper() and not path[-1].isupper()  # NcclCommunicator
    try:
        return isinstance(found(path), type)
    except AttributeError:
        return False


def problem(use):
    """The problem of a use, or None."""
    where = f"{use.place}: cupy.{'.'.join(use.path)}"
    if use.path in ON_OBJECTS:
        return None
    if use.path[:2] in LIBRARIES:
        own, names = compiled(use.path[1]), use.path[2:]
        if not all(map(own.has, names)):
            return f"{where}: not in CuPy"
        text = own.signature(".".join(names)) if names and use.count is not None else None
        return cupy_names.misfit(cupy_names.parameters(text), use) if text else None
    try:
        thing = found(use.path)
    except AttributeError:
        return f"{where}: not in CuPy"
    return cupy_names.misfit(cupy_names.signature(thing), use) if use.names or use.count else None


def all_uses():
    return [use for name, source in SOURCES.items()
            for use in cupy_names.uses_in(name, source, is_class)]


def test_every_name_and_every_call_is_one_of_cupy():
    uses = all_uses()
    problems = sorted({text for use in uses if (text := problem(use))})
    assert not problems, "\n".join(problems)
    paths = {use.path for use in uses}
    assert len(paths) > 50, "the walk finds what the code uses"
    assert {("exp",), ("cuda", "cublas", "gemmEx"), ("RawModule", "get_function"),
            ("cuda", "Device", "pci_bus_id"), ("cuda", "nccl", "NcclCommunicator", "allReduce"),
            ("cuda", "Stream", "synchronize")} <= paths


def test_every_method_of_an_array_is_one_of_cupy():
    import cupy

    methods = {name for name in dir(np.ndarray) if not name.startswith("_")} | {"get", "set"}
    uses = [use for name in ARRAYS for use in cupy_names.method_calls(name, SOURCES[name], methods)]
    problems = sorted({text for use in uses if (text := problem(use))})
    assert not problems, "\n".join(problems)
    assert {"reshape", "sum", "max", "astype", "get", "set"} <= {use.path[1] for use in uses}
    assert hasattr(cupy.cuda.MemoryPointer, "ptr")
    assert isinstance(cupy.cuda.Stream.null.ptr, int)


@pytest.mark.parametrize("name", ["gemmEx", "gemmStridedBatchedEx"])
def test_cublas_takes_as_many_arguments_as_its_stand_in(name):
    """The code calls both through a variable, which the walk cannot follow."""
    stand_in = {"gemmEx": fake_cublas.gemm_ex,
                "gemmStridedBatchedEx": fake_cublas.gemm_strided_batched_ex}[name]
    count = len(inspect.signature(stand_in).parameters)
    count += name == "gemmStridedBatchedEx"  # *rest: the type of the sums, and the algorithm
    assert len(cupy_names.parameters(compiled("cublas").signature(name)).parameters) == count


def test_what_the_walk_cannot_follow():
    """Check kernels in a dictionary, and the result of a method of ours."""
    import cupy

    use = Use("loader", ("RawKernel", "__call__"), 3, frozenset({"shared_mem"}))
    assert cupy_names.misfit(cupy_names.signature(cupy.RawKernel.__call__), use) is None
    assert "shared_mem=0" in cupy.RawKernel.__call__.__doc__
    limit = Use("memory_limit", ("cuda", "MemoryPool", "set_limit"), 0, frozenset({"size"}))
    assert cupy_names.misfit(cupy_names.signature(cupy.cuda.MemoryPool.set_limit), limit) is None
    assert hasattr(cupy.cuda.MemoryPool, "used_bytes")


def test_the_key_of_a_group_is_bytes():
    """It was a tuple of numbers before CuPy 14."""
    text = compiled("nccl").signature("NcclCommunicator")
    assert text.startswith("NcclCommunicator(int ndev, bytes commId, int rank")
    assert isinstance(fake_nccl.get_unique_id(), bytes)


WRONG = {
    "a name": ("y = self.xp.gelu(x)", "cupy.gelu: not in CuPy"),
    "a name of a part": ("cuda = self.xp.cuda\n    cuda.Evnt()", "cupy.cuda.Evnt: not in CuPy"),
    "a keyword": ("y = xp.zeros(3, kind=x)", "unexpected keyword argument 'kind'"),
    "too many": ("y = xp.exp(x, x, x)", "too many positional arguments"),
    "too few": ("y = xp.full(3)", "missing a required argument"),
    "of a method": ("xp.cuda.Device().used()", "cupy.cuda.Device.used: not in CuPy"),
    "of cuBLAS": ("self.blas = xp.cuda.cublas\n    self.blas.gemmX", "gemmX: not in CuPy"),
    "a call of NCCL": ("xp.cuda.nccl.NcclCommunicator(1, 2, 3).send(1, 2)", "missing a required"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_in_cupy_is_found(case):
    line, message = WRONG[case]
    source = f"def f(self, xp, x):\n    {line}\n"
    problems = [problem(use) for use in cupy_names.uses_in("made_up.py", source, is_class)]
    assert any(message in text for text in problems if text), problems
