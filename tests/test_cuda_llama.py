"""The fused kernels of SwiGLU and rotary positions: alone, in a step, and broken twins of them."""

import sys

import fake_cupy
import numpy as np
import pytest
from config_helpers import changed
from cuda_fused import BOUNDS, DTYPES, HostLoader, Poisoned, hosts
from helpers import assert_all_close
from test_cuda_fused import CASES, SHAPES, Case

from mpipar.comm.grid import Grid
from mpipar.config.model import ARCHS
from mpipar.config.resolve import resolve
from mpipar.ops.array_ops import rope_table
from mpipar.ops.cuda.fused import Fused
from mpipar.ops.mixed_ops import MixedOps
from mpipar.train.verify import step_tensors

SHAPE = ARCHS["llama"] | {
    "arch": "llama", "layers": 2, "d_model": 12, "heads": 4, "kv_heads": 2, "head_dim": 6,
    "ffn": 20, "seq_len": 6, "vocab_size": 17, "batch_size": 4, "num_microbatches": 2}


@pytest.fixture(params=hosts())
def where(request):
    return request.param


@pytest.fixture(params=CASES, ids=str)
def case(where, request, rng):
    dtype, off = request.param
    return Case(where, dtype, rng, off)


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu(case, shape):
    (h, h64), (dy, dy64) = case.array(*shape[:-1], 2, shape[-1]), case.array(*shape)
    case.check(case.fused.swiglu_forward(h), case.ops.swiglu_forward(h64))
    for got, expected in zip(case.fused.swiglu_backward_input(dy, h),
                             case.ops.swiglu_backward_input(dy64, h64), strict=True):
        case.check(got, expected)


def test_swiglu_far_out(case):
    gate = np.array([-1e4, -80.0, 0.0, 80.0, 1e4]).astype(case.dtype)
    h = np.stack([gate, np.full(5, 2.0, case.dtype)])[None]
    got = case.to_host(case.fused.swiglu_forward(case.to_device(h))).astype(np.float64)
    assert np.allclose(got[0], 2 * np.maximum(gate.astype(np.float64), 0.0), rtol=0, atol=1e-30)


@pytest.mark.parametrize("by_row", [False, True], ids=["positions alike", "positions by row"])
@pytest.mark.parametrize("width", [6, 48])
def test_rope_turns_the_first_heads_of_an_array(case, by_row, width):
    x, x64 = case.array(2, 5, 14, width)
    places = case.rng.integers(0, 9, (2, 5) if by_row else 5)
    table64 = rope_table(9, width, 10.0, ()).astype(np.float32)
    table, positions = case.to_device(table64), case.to_device(places)
    for function in ("rope_forward", "rope_backward_input"):
        getattr(case.fused, function)(x[:, :, :13], positions, table)
        getattr(case.ops, function)(x64[:, :, :13], places, table64.astype(np.float64))
        case.check(x, x64, bound=2 * case.bound)  # the second turns a rounded result
        x64 = case.to_host(x).astype(np.float64)


def test_rope_of_an_array_with_gaps_is_refused(where, rng):
    case = Case(where, "float32", rng)
    x, _ = case.array(2, 5, 3, 8)
    table = case.to_device(rope_table(9, 6, 10.0, ()).astype(np.float32))
    with pytest.raises(AssertionError):
        case.fused.rope_forward(x[..., :6], case.to_device(np.arange(5)), table)


def step(**run):
    """(loss, norm, gradients, weights) of one step of a small Llama."""
    config, _ = resolve(changed(**SHAPE, **run), 1)
    return step_tensors(config, np.random.default_rng(1).integers(0, 17, 200), Grid(0))


@pytest.mark.shim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow
def test_a_step_runs_in_kernels_and_is_that_of_numpy(monkeypatch, dtype):
    """In 16 bits both round between two functions. Nothing is widened."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    started, widened = [], []
    call, wide = fake_cupy.RawKernel.__call__, MixedOps._wide
    monkeypatch.setattr(fake_cupy.RawKernel, "__call__", lambda self, *rest, **named: (
        started.append(self.name.split("<")[0]), call(self, *rest, **named)))
    monkeypatch.setattr(MixedOps, "_wide", lambda self, x: (
        widened.append(x) if getattr(x, "dtype", None) == self.dtype else None, wide(self, x))[1])
    found = step(device="cuda", dtype=dtype, optimizer="sgd")
    microbatches, blocks = SHAPE["num_microbatches"], SHAPE["layers"]
    for kernel, count in (("swiglu_forward", blocks), ("swiglu_backward", blocks),
                          ("rotate", 2 * blocks), ("column_sums", 0), ("gelu_forward", 0)):
        assert started.count(kernel) == microbatches * count, kernel
    assert widened == []
    expected = step(dtype="float64" if dtype == "float32" else dtype, optimizer="sgd")
    tol = 1e-4 if dtype == "float32" else 4 * BOUNDS[dtype]
    assert found[:2] == pytest.approx(expected[:2], rel=tol)
    for got, wanted in zip(found[2:], expected[2:], strict=True):
        assert_all_close(got, wanted, tol)


TWINS = [
    ("swiglu.cu", "load(h + columns, at), d", "load(h, at), d"),
    ("swiglu.cu", "s[i] + silu[i] * (1.0f - s[i])", "s[i]"),
    ("rope.cu", "% period", "% 1"),
    ("rope.cu", "first[i] * cosine[i] - second[i]", "first[i] * cosine[i] + second[i]"),
    ("rope.cu", "token * stride", "token * (stride - 1)"),
]


@pytest.mark.shim
@pytest.mark.parametrize(("file", "right", "wrong"), TWINS)
def test_a_broken_kernel_is_seen(monkeypatch, rng, file, right, wrong):
    twin = HostLoader(edited=file, edit=(right, wrong))
    case = Case("forwards", "float32", rng)
    case.fused = Fused(Poisoned, twin)
    test, arguments = {"rope.cu": (test_rope_turns_the_first_heads_of_an_array, (True, 48)),
                       "swiglu.cu": (test_swiglu, (SHAPES[-1],))}[file]
    with pytest.raises(AssertionError):
        test(case, *arguments)
