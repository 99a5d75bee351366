"""The kernels for the package cuda-tile: on a stand-in, and through the package's own front end."""

import io
import sys

import fake_cuda_tile
import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from attention_cases import CASES, Case, Grouped, check_forward, lse_of
from cuda_fused import relative
from ops_cases import parts

from mpipar.errors import EnvironmentProblem
from mpipar.ops import make
from mpipar.ops.cuda.tile_model import (
    ATTENTION_TILES,
    TILES,
    TileModelAttention,
    TileModelGemm,
    attention_kernel,
    gemm_kernel,
)


def product(rng, dtype=np.float32):
    a, b = (
        fake_cupy.device(rng.standard_normal(shape).astype(dtype))
        for shape in ((133, 71), (71, 65))
    )
    out = fake_cupy.device(np.full((133, 65), np.nan, dtype))
    TileModelGemm(fake_cupy, fake_cuda_tile)(a, b, out)
    a, b, out = map(fake_cupy.asnumpy, (a, b, out))
    return out, a.astype(float) @ b.astype(float)


def test_product_at_odd_sizes(rng):
    out, expected = product(rng)
    assert np.linalg.norm(out - expected) <= 1e-6 * np.linalg.norm(expected)


def test_missing_padding_is_seen(rng, monkeypatch):
    monkeypatch.setattr(fake_cuda_tile.PaddingMode, "ZERO", np.nan)
    out, _ = product(rng)
    assert np.isnan(out).all()


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_against_float64(rng, dtype, kind):
    case = Case(rng, dtype, CASES[kind], kind)
    check_forward(case, *attend(case))


def attend(case):
    """y and the log of the sum of exp(score) of a case."""
    kernels = TileModelAttention(fake_cupy, None, fake_cuda_tile)
    qkv, positions = map(fake_cupy.device, (case.qkv, case.positions))
    y, stats = map(fake_cupy.asnumpy, kernels.forward(*parts(qkv), positions, positions))
    return y, lse_of(stats)


def test_attention_with_shared_key_heads_and_unequal_lengths(rng):
    case = Grouped(rng, "float32", (2, 67, 41, 6, 2, 24))
    q, cache, *positions = map(fake_cupy.device, (case.q, case.cache, case.q_pos, case.k_pos))
    k, v = (x.copy() for x in case.kv(cache))  # memory behind an array is not its cache
    kernels = TileModelAttention(fake_cupy, None, fake_cuda_tile)
    y, stats = map(fake_cupy.asnumpy, kernels.forward(q, k, v, *positions))
    lse = lse_of(stats)
    assert relative(y, case.y) <= case.bound * 2
    assert np.array_equal(np.isneginf(lse), np.isneginf(case.lse))
    seen = np.isfinite(case.lse)
    assert np.abs(lse[seen] - case.lse[seen]).max() <= 1e-5


def test_attention_without_its_padding_is_seen(rng, monkeypatch):
    monkeypatch.setattr(fake_cuda_tile.PaddingMode, "ZERO", 1e3)
    case = Case(rng, "float32", CASES["increasing"])
    with pytest.raises(AssertionError):
        check_forward(case, *attend(case))


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install '\.\[tile\]'"):
        make("cuda", "float32", gemm="cuda-tile")


@pytest.mark.nvrtc
@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float16"),
        ("float16", "float32"),
    ],
)
def test_front_end_takes_the_kernel(dtype, out_dtype, accumulate):
    assert (
        bytecode(
            gemm_kernel,
            lambda array: [
                array(dtype, (1, None)),
                array(dtype, (None, 1)),
                array(out_dtype, (None, 1)),
                accumulate,
                *TILES[itemsize(dtype)],
            ],
        )
        > 500
    )


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_front_end_takes_attention(dtype):
    heads = (None, None, None, 1)
    assert (
        bytecode(
            attention_kernel,
            lambda array: [
                *[array(dtype, heads)] * 3,
                *[array("int64", (1,))] * 2,
                array(dtype, heads),
                *[array("float32", (None, None, None))] * 2,
                0.125,
                3,
                *ATTENTION_TILES[itemsize(dtype)],
                64,
            ],
        )
        > 500
    )


def itemsize(dtype):
    return 4 if dtype == "float32" else np.dtype(ml_dtypes.bfloat16).itemsize


def bytecode(make_kernel, parameters):
    """The front end's bytes: it checks types and shapes, but does not make machine code."""
    ct = pytest.importorskip("cuda.tile")
    from cuda.tile import compilation

    def array(name, stride_constant):
        return compilation.ArrayConstraint(
            getattr(ct, name),
            len(stride_constant),
            index_dtype=ct.int32,
            stride_lower_bound_incl=0,
            alias_groups=(),
            may_alias_internally=False,
            stride_constant=stride_constant,
        )

    signature = compilation.KernelSignature(
        parameters(array), compilation.CallingConvention.cutile_python_v1()
    )
    code = io.BytesIO()
    compilation.export_kernel(
        make_kernel(ct),
        [signature],
        code,
        gpu_code=None,
        output_format="tileir_bytecode",
        bytecode_version="13.3",
    )
    return len(code.getvalue())
