"""Kernels of a file with the same template arguments are compiled by one call of NVRTC."""

import re
from types import SimpleNamespace

import cuda_kernels
import pytest
from helpers import REPOSITORY

from mpipar.ops.cuda.kernels import Loader, source, together

BF16 = {
    file: [name for name in names if "<bf16" in name]
    for file, names in cuda_kernels.KERNELS.items()
}
# Files that take more than one call for bfloat16: they have tiles, or results of another type.
MORE = {"columns.cu", "flash_forward.cu", "flash_backward.cu", "gemm_mma.cu"}


@pytest.mark.parametrize(("file", "names"), cuda_kernels.KERNELS.items())
def test_a_kernel_is_compiled_with_those_of_its_template_arguments(file, names):
    text = source(file)
    for name in names:
        found = together(name, text)
        assert name in found
        assert len(set(found)) == len(found)
        values = name.partition("<")[2].rstrip(">").split(", ")
        for other in filter(lambda one: "<" in one, found):
            assert set(other.partition("<")[2].rstrip(">").split(", ")) <= {*values}, (name, other)


@pytest.mark.parametrize("file", [file for file, names in BF16.items() if names])
def test_a_file_of_one_type_is_compiled_once(file):
    modules = {}
    for name in BF16[file]:
        if name not in modules:
            modules |= dict.fromkeys(together(name, source(file)), name)
    assert {*BF16[file]} <= modules.keys()
    assert (len(set(modules.values())) > 1) == (file in MORE)


def test_names_of_one_file():
    text = source("embedding.cu")
    assert together("position_forward<half, float, 64>", text) == (
        "embedding_forward<half, 64>",
        "position_forward<half, float, 64>",
        "places_in_tiles<64>",
        "merge_runs",
        "add_rows<half, float>",
    )
    assert together("add_rows<half, float>", text) == ("merge_runs", "add_rows<half, float>")
    assert together("adamw", source("adamw.cu")) == ("adamw",)
    with pytest.raises(ValueError, match="zip"):
        together("add_rows<half, float, 7>", text)


def test_the_loader_compiles_each_module_once():
    made, started = [], []

    class RawModule:
        def __init__(self, code, options, name_expressions):
            made.append(name_expressions)

        def get_function(self, name):
            assert name in made[-1]
            return lambda grid, block, values, shared_mem: started.append(name)

    device = SimpleNamespace(compute_capability="90")
    loader = Loader(
        SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device), RawModule=RawModule)
    )
    names = ["gelu_forward<bf16>", "gelu_backward<bf16>", "gelu_forward<bf16>"]
    for name in names:
        loader.launch("gelu.cu", name, (1,), (1,), ())
    assert started == names
    assert made == [("gelu_forward<bf16>", "gelu_backward<bf16>")]


def test_every_mistake_of_the_gpu_path_has_a_test_that_exists():
    tests = REPOSITORY / "tests"
    sources = {path.name: path.read_text() for path in tests.rglob("test_*.py")}
    lines = (
        (tests / "elsewhere" / "cuda_machine" / "README.md")
        .read_text()
        .partition("What was wrong")[2]
    )
    rows = [line for line in lines.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for file, name in named:
            assert f"\ndef {name}(" in sources[file], row
