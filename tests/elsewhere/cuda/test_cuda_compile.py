"""CUDA sources: what NVIDIA's compiler says of every kernel, calls of NVRTC, CuPy's names."""

import functools
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import cuda_kernels
import fake_nccl
import pytest

from bench.kernels import __main__ as bench_kernels
from bench.kernels import nvrtc
from mpipar.ops.cuda.kernels import Loader, source, together

# The sources are the same for both: of the older one, those that need most registers.
CASES = [*((file, "sm_90") for file in cuda_kernels.KERNELS), ("flash_forward.cu", "sm_80")]
CASES += [("gemm_mma.cu", "sm_80"), ("norm.cu", "sm_80")]
MOST_SHARED = 48 << 10  # static shared memory that any GPU gives a block
# File -> what its kernels are called that memory decides about.
WIDE = {
    "gelu.cu": "gelu",
    "swiglu.cu": "swiglu",
    "rope.cu": "rotate",
    "norm.cu": "norm",
    "columns.cu": "column_sums",
    "adamw.cu": "adamw",
    "cross_entropy.cu": "cross_entropy_(stats|backward)",
    "embedding.cu": "embedding_forward|position_forward|add_rows",
}
SUMS = "column_sums|slabs|stats"  # write a few numbers for what they read
WIDE_MOVE = r"{}\.global(\.nc)?\.(v4\.[bfsu]32|v2\.[bfsu]64)"
SLOW = r"\b(div|rem)\.[su]64"  # about 70 instructions


def narrow_moves(name, ptx):
    """What of a kernel's code moves memory slowly: names of what is missing, or too much."""
    missing = [
        way
        for way in ("ld", "st")
        if not re.search(WIDE_MOVE.format(way), ptx) and (way == "ld" or not re.search(SUMS, name))
    ]
    return missing + [found[0] for found in re.finditer(SLOW, ptx)]


@pytest.mark.nvrtc
@pytest.mark.parametrize(("file", "arch"), CASES)
def test_kernels_compile_within_their_budget(file, arch):
    names = cuda_kernels.KERNELS[file]
    assert names
    _, usage = nvrtc.Nvrtc().compile(cuda_kernels.source(file), names, arch)
    for name, used in usage.items():
        assert used.spill_bytes == used.stack_bytes == 0, (name, used)
        assert used.registers <= cuda_kernels.REGISTERS.get(file, 128), (name, used)
        assert used.shared_bytes <= MOST_SHARED, (name, used)


@pytest.mark.nvrtc
@pytest.mark.parametrize("file", WIDE)
def test_what_memory_decides_about_is_moved_in_16_bytes(file):
    names = [name for name in cuda_kernels.KERNELS[file] if re.search(WIDE[file], name)]
    assert names
    text = cuda_kernels.source(file)
    ptx, _ = nvrtc.Nvrtc().compile(text, names, "sm_90")
    assert {name: found for name in names if (found := narrow_moves(name, ptx[name]))} == {}
    # A twin that takes single elements.
    assert text.count("constexpr int WIDE = 16 / sizeof(T)") == 1
    narrow = text.replace("constexpr int WIDE = 16 / sizeof(T)", "constexpr int WIDE = 1")
    ptx, _ = nvrtc.Nvrtc().compile(narrow, names, "sm_90")
    assert all(narrow_moves(name, ptx[name])[:1] == ["ld"] for name in names)


@pytest.mark.nvrtc
def test_a_division_of_64_bits_is_seen():
    source = """
    __global__ void of_columns(const float4 *x, float4 *y, long long columns) {
        y[threadIdx.x % columns] = x[threadIdx.x];
    }
    """
    ptx, _ = nvrtc.Nvrtc().compile(source, ["of_columns"], "sm_90")
    assert {*narrow_moves("of_columns", ptx["of_columns"])} == {"rem.s64"}


@pytest.mark.nvrtc
def test_what_spills_is_seen():
    source = """
    template <int Values> __global__ void __launch_bounds__(1024) spills(float *x) {
        float values[Values];
        #pragma unroll
        for (int i = 0; i < Values; ++i) values[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < Values; ++i) x[i * 1024 + threadIdx.x] = values[Values - 1 - i];
    }
    """
    _, usage = nvrtc.Nvrtc().compile(source, ["spills<8>", "spills<200>"], "sm_80")
    assert usage["spills<8>"].spill_bytes == 0
    assert usage["spills<200>"].spill_bytes > 0
    assert usage["spills<200>"].registers <= 64


@pytest.mark.nvrtc
def test_table_of_the_ladder(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    assert bench_kernels.main(["--json", str(path)], None) == 0
    result = json.loads(path.read_text())
    rows = {row["kernel"]: row for row in result["rows"]}
    assert result["machine"]["nvrtc"].startswith("12.")
    assert [row["flop_per_byte"] for row in result["rows"]] == [0.25, 8, 16, 32, 32, 64]
    assert rows["gemm_shared.cu"]["shared_KiB"] == 2 * 32 * 33 * 4 / 1024
    assert rows["gemm_mma.cu"]["shared_KiB"] == 3 * (128 * 40 + 32 * 136) * 2 / 1024
    assert all(0 < row["registers_sm_90"] <= 128 for row in rows.values())
    assert "gemm_warp.cu" in capsys.readouterr().out


# --- kernels of a file with the same template arguments are compiled by one call of NVRTC


BF16 = {
    file: [name for name in names if "<bf16" in name]
    for file, names in cuda_kernels.KERNELS.items()
}
# Files that take more than one call for bfloat16: they have tiles, or results of another type.
MORE = {"columns.cu", "flash_forward.cu", "flash_backward.cu", "gemm_mma.cu"}


@pytest.mark.parametrize(("file", "names"), cuda_kernels.KERNELS.items())
def test_a_kernel_is_compiled_with_those_of_its_template_arguments(file, names):
    text = cuda_kernels.source(file)
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
            modules |= dict.fromkeys(together(name, cuda_kernels.source(file)), name)
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


# --- the stand-in for CuPy's NCCL has the names and the arguments of the real one


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


@pytest.mark.cupy
@pytest.mark.parametrize("name", sorted(METHODS | FUNCTIONS))
def test_a_call_takes_as_many_arguments_as_that_of_cupy(name):
    stand_in = getattr(CLASS, name, None) or getattr(fake_nccl, name)
    own = [one for one in inspect.signature(stand_in).parameters if one != "self"]
    real = parameters(f"NcclCommunicator.{name}" if name in METHODS else name)
    assert real is not None, f"CuPy has no {name}"
    assert len(own) == len(real), (own, real)


@pytest.mark.cupy
def test_constants_are_those_of_cupy():
    assert {name for name in CONSTANTS if b"\0%s\0" % name.encode() not in module()} == set()


@pytest.mark.cupy
def test_the_key_of_a_group_is_bytes():
    """It was a tuple of numbers before CuPy 14."""
    assert parameters("NcclCommunicator")[:3] == ["int ndev", "bytes commId", "int rank"]
    assert isinstance(fake_nccl.get_unique_id(), bytes)


@pytest.mark.cupy
def test_what_is_not_in_cupy_is_found():
    assert parameters("NcclCommunicator.sendAll") is None
    assert parameters("sendAll") is None
