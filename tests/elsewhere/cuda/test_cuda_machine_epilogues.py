"""Products with epilogues on the CUDA machine: the kernels after products, broken, refused.

The machine's cuBLASLt refuses what the real one refuses, and holds a caller to what it promised.
"""

import contextlib
import ctypes
import warnings

import numpy as np
import pytest
from config_helpers import changed
from helpers import assert_all_close, assert_close
from test_cuda_machine import counted, pytestmark  # noqa: F401  (gpu, and the machine alone)

from mpipar.comm.grid import Grid
from mpipar.config.resolve import resolve
from mpipar.ops import make
from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cuda import epilogues
from mpipar.ops.cuda.fused import FusedOps
from mpipar.ops.mixed_ops import DTYPES
from mpipar.run.verify import step_tensors

ALL = {"float32": np.dtype(np.float32), **DTYPES}
BOUNDS = {"float32": 2e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}
ROWS, WIDTH, INNER = 24, 40, 56


@pytest.fixture(params=ALL)
def case(request, rng):
    """(ops, arguments of the device, the same in float64)."""
    dtype = ALL[request.param]
    shapes = {
        "x": (2, ROWS // 2, WIDTH),
        "w": (WIDTH, INNER),
        "b": (INNER,),
        "dy": (2, ROWS // 2, INNER),
    }
    host = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    ops = make("cuda", request.param)
    return (
        ops,
        {name: ops.asarray(x) for name, x in host.items()},
        {name: x.astype(np.float64) for name, x in host.items()},
    )


def result(ops, arguments):
    return ops.matmul_bias(*(arguments[name] for name in "xwb"))


def check(case):
    ops, device, exact = case
    got, right = result(ops, device), result(ArrayOps(np, "float64", "cpu"), exact)
    assert got.dtype == ops.dtype
    assert_close(ops.to_host(got).astype(np.float64), right, BOUNDS[ops.dtype.name], "y")


@pytest.mark.parametrize("turned", [False, True])
def test_one_call_makes_what_follows_the_product_too(case, turned):
    ops, device, _ = case
    if turned:
        device["w"] = ops.asarray(np.ascontiguousarray(ops.to_host(device["w"]).T)).T
    before = {kind: counted(kind) for kind in ("launch", "product")}
    result(ops, device)
    assert {kind: counted(kind) - before[kind] for kind in before} == {"launch": 0, "product": 1}
    check(case)


@pytest.mark.parametrize("turned", [False, True])
def test_sums_of_rows_come_with_the_gradient_of_weights(case, turned):
    """A launch adds what the product's kernel has written to the sums so far."""
    ops, device, exact = case
    out = ops.zeros((INNER, WIDTH) if turned else (WIDTH, INNER), np.float32)
    out = out.T if turned else out
    sums = ops.asarray(np.full(INNER, 5, np.float32))
    before = {kind: counted(kind) for kind in ("launch", "product")}
    for _ in range(2):
        ops.matmul_tn_add_sums(device["x"], device["dy"], out, sums)
    found = {kind: counted(kind) - before[kind] for kind in before}
    assert found == {"launch": 2, "product": 2}
    x, dy = exact["x"].reshape(-1, WIDTH), exact["dy"].reshape(-1, INNER)
    assert_close(ops.to_host(out), 2 * (x.T @ dy), 2e-6, "out")
    assert_close(ops.to_host(sums), 5 + 2 * dy.sum(axis=0), 2e-6, "sums")


def test_every_run_gives_the_same_bits(case):
    ops, device, _ = case
    one, two = (ops.to_host(result(ops, device)).tobytes() for _ in range(2))
    assert one == two


def test_a_plan_is_made_once_for_a_shape(case, monkeypatch):
    ops, device, _ = case
    result(ops, device)
    monkeypatch.setattr(epilogues.Epilogues, "_plan", None)
    check(case)


def test_a_wrong_place_of_the_bias(case, monkeypatch):
    """The broken twin: the bias of the call before."""
    ops, device, _ = case
    result(ops, device | {"b": ops.asarray(np.full(INNER, 9).astype(ops.dtype))})
    monkeypatch.setattr(epilogues.Epilogues, "_point", lambda *_: None)
    with pytest.raises(AssertionError):
        check(case)


def test_less_workspace_than_was_promised(case):
    ops, device, _ = case
    result(ops, device)
    kept = exact_ops(ops)._epilogues
    kept._workspace = kept._workspace[:0]
    for plan in kept._plans.values():
        plan.found.workspace = 0
    with pytest.raises(RuntimeError, match="cublasLtMatmul: cublasStatus_t 7"):
        result(ops, device)


def test_operands_that_are_less_aligned_have_a_plan_of_their_own(case):
    """The bits of an element further on: what was chosen for 256 bytes does not hold there."""
    ops, device, _ = case
    result(ops, device)
    for which in "xwb":
        x = device[which]
        buffer = ops.empty((x.size + 1,), x.dtype)
        device[which] = buffer[1:].reshape(x.shape)
        ops.copy(device[which], x)
        check(case)


def test_what_is_refused_is_computed_by_kernels(case, monkeypatch):
    """The library finds no algorithm without a workspace; the words come once."""
    monkeypatch.setattr(epilogues, "MOST_WORKSPACE", 0)
    ops, device, _ = case
    with pytest.warns(UserWarning, match=f"refuses epilogue 4 of {ops.dtype.name}"):
        result(ops, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(case)


def test_without_the_library_kernels_follow_products(case, monkeypatch):
    def missing(name):
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.warns(UserWarning, match="cuBLASLt is missing .*: kernels after the product"):
        ops = make("cuda", case[0].dtype.name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("cuda", case[0].dtype.name, host_rank=1)
    check((ops, *case[1:]))


def step(**run):
    """(loss, norm, gradients, weights) of a step of two microbatches; no width is refused."""
    config, _ = resolve(
        changed(
            layers=2,
            d_model=16,
            heads=2,
            ffn=24,
            seq_len=6,
            vocab_size=17,
            batch_size=4,
            num_microbatches=2,
            optimizer="sgd",
            **run,
        ),
        1,
    )
    return step_tensors(config, np.random.default_rng(1).integers(0, 17, 200), Grid(0))


@pytest.mark.parametrize("stale", [False, True])
def test_a_step_is_that_of_float64(monkeypatch, stale):
    """stale: a broken twin, whose second microbatch overwrites the first one's bias gradients."""
    if stale:
        plain = FusedOps.matmul_tn_add_sums

        def overwritten(ops, x, y, out, sums):
            ops.fill(sums, 0)
            plain(ops, x, y, out, sums)

        monkeypatch.setattr(FusedOps, "matmul_tn_add_sums", overwritten)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, norm, *tensors = step(dtype="float32", device="cuda")
    right_loss, right_norm, *right = step(dtype="float64")
    assert loss == pytest.approx(right_loss, rel=1e-6)
    with pytest.raises(AssertionError) if stale else contextlib.nullcontext():
        assert norm == pytest.approx(right_norm, rel=1e-6)
        for got, wanted in zip(tensors, right, strict=True):
            assert_all_close(got, wanted, 1e-4)


def exact_ops(ops):
    return getattr(ops, "exact", ops)
