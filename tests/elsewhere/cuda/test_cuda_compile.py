"""NVIDIA's compiler accepts every kernel, within a budget of registers and without spills."""

import json
import re

import cuda_kernels
import pytest

from bench.kernels import __main__ as bench_kernels
from bench.kernels import nvrtc
from mpipar.ops.cuda import kernels

pytestmark = pytest.mark.nvrtc
ARCHITECTURES = ("sm_80", "sm_90")
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
    "softmax.cu": "softmax",
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


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", cuda_kernels.KERNELS)
def test_kernels_compile_within_their_budget(file, arch):
    names = cuda_kernels.KERNELS[file]
    assert names
    _, usage = nvrtc.Nvrtc().compile(kernels.source(file), names, arch)
    for name, used in usage.items():
        assert used.spill_bytes == used.stack_bytes == 0, (name, used)
        assert used.registers <= cuda_kernels.REGISTERS.get(file, 128), (name, used)
        assert used.shared_bytes <= MOST_SHARED, (name, used)


@pytest.mark.parametrize("file", WIDE)
def test_what_memory_decides_about_is_moved_in_16_bytes(file):
    names = [name for name in cuda_kernels.KERNELS[file] if re.search(WIDE[file], name)]
    assert names
    text = kernels.source(file)
    ptx, _ = nvrtc.Nvrtc().compile(text, names, "sm_90")
    assert {name: found for name in names if (found := narrow_moves(name, ptx[name]))} == {}
    # A twin that takes single elements.
    assert text.count("constexpr int WIDE = 16 / sizeof(T)") == 1
    narrow = text.replace("constexpr int WIDE = 16 / sizeof(T)", "constexpr int WIDE = 1")
    ptx, _ = nvrtc.Nvrtc().compile(narrow, names, "sm_90")
    assert all(narrow_moves(name, ptx[name])[:1] == ["ld"] for name in names)


def test_a_division_of_64_bits_is_seen():
    source = """
    __global__ void of_columns(const float4 *x, float4 *y, long long columns) {
        y[threadIdx.x % columns] = x[threadIdx.x];
    }
    """
    ptx, _ = nvrtc.Nvrtc().compile(source, ["of_columns"], "sm_90")
    assert {*narrow_moves("of_columns", ptx["of_columns"])} == {"rem.s64"}


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


def test_an_array_outside_registers_is_seen():
    source = """
    template <int Values> __global__ void looks_up(float *x, int at) {
        float values[Values];
        for (int i = 0; i < Values; ++i) values[i] = x[i];
        for (int i = 0; i < Values; ++i) x[i] = values[(i * at) % Values];
    }
    """
    _, usage = nvrtc.Nvrtc().compile(source, ["looks_up<64>"], "sm_80")
    assert usage["looks_up<64>"].stack_bytes == 256
    assert usage["looks_up<64>"].spill_bytes == 0


def test_what_does_not_compile_is_said():
    with pytest.raises(RuntimeError, match="undefined"):
        nvrtc.Nvrtc().compile(
            "template <int N> __global__ void f() { nothing(N); }", ["f<1>"], "sm_90"
        )


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
