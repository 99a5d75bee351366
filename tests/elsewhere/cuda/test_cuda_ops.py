"""The array functions and steps of training on a GPU: products, fused kernels, plain ones, copies.

Tests marked gpu run on a GPU, and in CI on the CUDA machine: the real CuPy on a CPU.
"""

from dataclasses import replace
from time import perf_counter_ns

import ml_dtypes
import numpy as np
import pytest
from config_helpers import changed, check_refused
from helpers import assert_all_close, assert_close
from ops_cases import (
    ADAMW,
    HALF_UNIT,
    LARGE,
    call_every_op,
    check_every_op,
    plain,
    relative,
    runs_of,
)

from mpipar.comm.grid import Grid
from mpipar.config.model import ARCHS
from mpipar.config.resolve import resolve
from mpipar.ops import make, shapes_for
from mpipar.ops.cuda.epilogues import Epilogues
from mpipar.ops.cuda.fused import FusedOps
from mpipar.ops.cuda.kernels import Loader
from mpipar.ops.mixed_ops import MixedOps
from mpipar.run.verify import step_tensors
from mpipar.study.explain.predict import predict

BOUNDS = {"float32": 2e-6, **HALF_UNIT}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
WAYS = ["blas", "tile"]
SHAPE = {
    "layers": 2,
    "d_model": 12,
    "heads": 3,
    "ffn": 20,
    "seq_len": 6,
    "vocab_size": 17,
    "batch_size": 4,
    "num_microbatches": 2,
}


LLAMA = ARCHS["llama"] | SHAPE | {"arch": "llama", "heads": 4, "kv_heads": 2, "head_dim": 6}


@pytest.fixture
def traced(monkeypatch, cupy):
    """(names of the kernels that are started, arrays of 16 bits that are widened).

    Without cuBLASLt, which does some of the kernels' work: see test_cuda_machine_epilogues.py.
    """
    monkeypatch.setattr(Epilogues, "__call__", lambda self, *arguments, **named: False)
    started, widened = [], []
    launch, wide = Loader.launch, MixedOps._wide
    monkeypatch.setattr(
        Loader,
        "launch",
        lambda self, file, name, *rest, **named: (
            started.append(name.split("<")[0]),
            launch(self, file, name, *rest, **named),
        ),
    )
    monkeypatch.setattr(
        MixedOps,
        "_wide",
        lambda self, x: (
            widened.append(x) if getattr(x, "dtype", None) == self.dtype else None,
            wide(self, x),
        )[1],
    )
    return started, widened


@pytest.fixture(params=["in tiles", "whole scores"])
def attention(request, monkeypatch):
    """Attention in both ways: with heads that fit a tile, and as if none did."""
    if request.param == "whole scores":
        monkeypatch.setattr(FusedOps, "tiled_head_width", 0)
    return request.param


@pytest.mark.parametrize("kind", ["increasing", "shuffled", "ties"])
@pytest.mark.parametrize(
    ("dtype", "kernels", "tol"),
    [("float64", "plain", 1e-11), ("float32", "plain", 2e-5), ("float32", "fused", 2e-5)],
)
@pytest.mark.pairs
def test_every_function_equals_plain(cupy, attention, dtype, kernels, tol, kind):
    def close(got, expected, _, name):
        assert_close(got, expected, tol, name)

    check_every_op(make("cuda", dtype, kernels=kernels), LARGE, close, kind=kind)


def step(shape=SHAPE, **run):
    """(loss, norm, gradients, weights) of one step of a small model."""
    config, _ = resolve(changed(**shape, **run), 1)
    return step_tensors(config, np.random.default_rng(1).integers(0, 17, 200), Grid(0))


@pytest.fixture(scope="module")
def exact():
    """The same steps by NumPy's plain functions in float64, by optimizer; "rms" has that norm."""
    steps = {name: step(dtype="float64", optimizer=name) for name in ("sgd", "adamw")}
    return steps | {"rms": step(dtype="float64", optimizer="sgd", norm="rms")}


def check_step(found, expected, tol):
    """Compare all results of two steps; tol: of loss and norm, of tensors."""
    assert found[:2] == pytest.approx(expected[:2], rel=tol[0])
    for got, wanted in zip(found[2:], expected[2:], strict=True):
        assert_all_close(got, wanted, tol[1])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_float32_step_is_that_of_float64(cupy, attention, exact, optimizer):
    check_step(step(device="cuda", optimizer=optimizer), exact[optimizer], (1e-6, 1e-4))


def test_a_float32_step_with_rmsnorm_is_that_of_float64(cupy, exact):
    check_step(step(device="cuda", optimizer="sgd", norm="rms"), exact["rms"], (1e-6, 1e-4))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_16_bit_step_is_that_of_numpy(cupy, attention, dtype):
    """Both round between two functions; a GPU's attention also rounds operands of its products.

    These are probabilities and their gradients.
    """
    unit = HALF_UNIT[dtype]
    run = {"dtype": dtype, "optimizer": "sgd"}
    check_step(step(device="cuda", **run), step(**run), (unit, 4 * unit))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        ("gelu_forward", lambda ops, x: x),
        ("matmul_tn_add_sums", lambda ops, x, y, out, sums: ops.matmul_tn_add(x, y, out)),
        ("rmsnorm_backward_weight", lambda ops, dy, x, rstd, dw: None),
        ("attention_backward_input", lambda ops, *rest, out: [ops.fill(x, 0) for x in out]),
        ("cross_entropy_backward_input", lambda ops, logits, *rest: logits),
    ],
    ids=lambda one: one[0],
)
def test_a_kernel_that_is_left_out_is_seen(monkeypatch, cupy, exact, change):
    monkeypatch.setattr(FusedOps, *change)
    norm, wanted = ("rms", "rms") if change[0].startswith("rms") else ("layer", "sgd")
    with pytest.raises(AssertionError):
        check_step(step(device="cuda", optimizer="sgd", norm=norm), exact[wanted], (1e-6, 1e-4))


@pytest.mark.parametrize(
    ("dtype", "norm"), [*((dtype, "layer") for dtype in DTYPES), ("bfloat16", "rms")]
)
def test_nothing_between_products_is_plain_or_widened(traced, attention, dtype, norm):
    """Counts the kernels that a step starts; nothing of 16 bits is widened."""
    started, widened = traced
    step(device="cuda", dtype=dtype, optimizer="adamw", norm=norm)
    microbatches, blocks = SHAPE["num_microbatches"], SHAPE["layers"]
    kernels = {
        "in tiles": ("flash_forward", "flash_delta", "flash_backward", "flash_dq"),
        "whole scores": (),
    }[attention]
    norms = 2 * blocks + 1
    once = {
        "gelu_forward": blocks,
        "gelu_backward": blocks,
        "column_sums": 4 * blocks,
        **{f"{norm}norm_{part}": norms for part in ("forward", "backward", "slabs")},
        **dict.fromkeys(kernels, blocks),
        "embedding_forward": 1,
        "position_forward": 1,
        "places_in_tiles": 2,
        "add_rows": 2,
        "cross_entropy_stats": 1,
        "cross_entropy_combine": 1,
        "cross_entropy_backward": 1,
    }
    counts = {name: microbatches * count for name, count in once.items()}
    updates = "adamw" if dtype == "float32" else "adamw_with_copy"
    counts[updates] = 1
    assert {name: started.count(name) for name in started} == counts
    assert widened == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow
def test_a_step_of_llama_runs_in_kernels_and_is_that_of_numpy(traced, dtype):
    """In 16 bits both round between two functions. Nothing is widened."""
    started, widened = traced
    found = step(LLAMA, device="cuda", dtype=dtype, optimizer="sgd")
    microbatches, blocks = SHAPE["num_microbatches"], SHAPE["layers"]
    for kernel, count in (
        ("swiglu_forward", blocks),
        ("swiglu_backward", blocks),
        ("rotate", 2 * blocks),
        ("column_sums", 0),
        ("gelu_forward", 0),
    ):
        assert started.count(kernel) == microbatches * count, kernel
    assert widened == []
    tol = 1e-4 if dtype == "float32" else 4 * BOUNDS[dtype]
    check_step(
        found,
        step(LLAMA, dtype="float64" if dtype == "float32" else dtype, optimizer="sgd"),
        (tol, tol),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_update_writes_the_rounded_weights(rng, cupy, dtype):
    ops = make("cuda", dtype)
    master, grad, m, v = (cupy.asarray(rng.uniform(0.5, 2, 300).astype("f4")) for _ in range(4))
    rounded = ops.empty((300,))
    ops.adamw_runs(master, grad, m, v, runs_of(300), ADAMW._replace(lr=0.1), rounded)
    assert (ops.to_host(rounded) == ops.to_host(master).astype(DTYPES[dtype])).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_are_those_of_the_fused_kernels(cupy, attention, dtype):
    config = changed(dtype=dtype, device="cuda")
    ops, on_shapes = make("cuda", dtype), shapes_for(config.run, None)
    real, shapes = call_every_op(ops), call_every_op(on_shapes)
    assert shapes.keys() == real.keys()
    for name, value in real.items():
        if np.shape(value):  # not of numbers, which each kind of array has in its own way
            assert (shapes[name].shape, shapes[name].dtype) == (value.shape, value.dtype), name
    q, positions = ops.zeros((2, 7, 4, 5)), cupy.arange(7)
    saved, expected = (
        one.attention_forward(*3 * [one.asarray(q)], *2 * [one.asarray(positions)])[1]
        for one in (on_shapes, ops)
    )
    if attention == "in tiles":
        (same, saved), (y, expected) = saved, expected
        assert (same.shape, same.dtype) == (y.shape, y.dtype)
    assert (saved.shape, saved.dtype) == (expected.shape, expected.dtype)


def test_no_probabilities_are_predicted_on_a_gpu():
    """3 heads attend to 64 tokens. y is kept too, because the next product reads it."""
    shape = SHAPE | {"seq_len": 64, "vocab_size": 128}  # a table without padding
    config, _ = resolve(changed(**shape, dtype="float32"), 1)
    on_gpu = replace(config, run=replace(config.run, device="cuda"))
    cpu, gpu = (predict(one, 0).peak_bytes["stash"] for one in (config, on_gpu))
    numbers = 4 * 2 * 3 * 64 * SHAPE["layers"]  # one per query of the microbatch that is there
    assert cpu - gpu == 64 * numbers - 2 * numbers


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_parts_of_dq_are_predicted_on_a_gpu(dtype):
    ops = shapes_for(changed(dtype=dtype, device="cuda").run, None)
    q, positions = ops.zeros((2, 200, 3, 40)), ops.asarray(np.arange(200))
    stats, delta = (ops.zeros((2, 3, 200, *more), np.float32) for more in ((2,), ()))
    ops.reset_peak()
    ops.attention_block_backward(q, q, q, q, stats, delta, q_pos=positions, k_pos=positions)
    parts, padded = (4, 224) if dtype == "float32" else (2, 256)
    assert ops.peak["buffers"] == 4 * parts * 2 * 3 * padded * 64
    assert ops.peak["stash"] >= 3 * 4 * q.size + q.nbytes  # the results are there beside them


def test_prediction_has_no_widened_copies_on_a_gpu():
    """On the CPU the logits are widened for the loss: 4 bytes where the activations have 2.

    So they are by plain kernels, which multiply 16 bits as they are.
    """
    config, _ = resolve(changed(**SHAPE | {"vocab_size": 4096}, dtype="bfloat16"), 1)
    on_gpu = replace(config, run=replace(config.run, device="cuda"))
    plain_gpu = replace(config, run=replace(config.run, device="cuda", kernels="plain"))
    cpu, gpu, unfused = (predict(one, 0).peak_bytes for one in (config, on_gpu, plain_gpu))
    wide = 4 * 4096 * 6 * 2  # logits of a microbatch of two rows of six tokens
    assert cpu["buffers"] - gpu.get("buffers", 0) >= wide
    assert unfused["buffers"] == gpu.get("buffers", 0) + wide


# Products: cuBLAS's calling rules, and the hand-written kernels.


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gemm", WAYS)
def test_16_bits_are_multiplied_as_they_are(rng, cupy, monkeypatch, gemm, dtype):
    """Tensor cores multiply 16 bits: products alone are not widened to float32 first."""
    ops = make("cuda", dtype, gemm=gemm)
    x, w = (
        ops.asarray(rng.standard_normal(shape).astype(DTYPES[dtype]))
        for shape in ((9, 24), (24, 17))
    )
    monkeypatch.setattr(MixedOps, "_wide", None)  # this function would widen
    y = ops.matmul(x, w)
    dw = ops.zeros((24, 17), ops.accum_dtype)
    ops.matmul_tn_add(x, y, dw)
    assert (y.dtype, dw.dtype) == (DTYPES[dtype], np.float32)
    x, y = (ops.to_host(value).astype(np.float64) for value in (x, y))
    assert relative(y, x @ ops.to_host(w).astype(np.float64)) < BOUNDS[dtype]
    assert relative(ops.to_host(dw), x.T @ y) < BOUNDS["float32"]


def test_a_checksum_is_that_of_the_plain_formula(rng, cupy):
    ops, expected = make("cuda", "float32", kernels="plain"), plain("float32")
    ops.checksum_block = expected.checksum_block
    x = rng.standard_normal(expected.checksum_block + 3).astype(np.float32)
    assert ops.checksum(ops.asarray(x)) == expected.checksum(x) != 0


@pytest.mark.parametrize("gemm", WAYS)
def test_a_piece_without_rows_is_a_product_too(cupy, gemm):
    """A rank of the ring has such a piece if there are fewer tokens than ranks."""
    ops = make("cuda", "float32", gemm=gemm)
    none, w, dw = (
        cupy.zeros((0, 8), np.float16),
        cupy.ones((8, 6), np.float16),
        cupy.ones((8, 6), np.float32),
    )
    assert ops.matmul(none, w).shape == (0, 6)
    ops.matmul_tn_add(none, ops.matmul(none, w), dw)
    assert ops.to_host(dw).tolist() == np.ones((8, 6)).tolist()


@pytest.mark.parametrize("gemm", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_every_type(rng, cupy, gemm, dtype):
    """Activations keep their type, gradients of weights are float32; none is a copy's."""
    ops = make("cuda", "float32", gemm=gemm)
    host = [
        rng.standard_normal(shape).astype(DTYPES[dtype])
        for shape in ((3, 47, 33), (33, 70), (70, 33), (3, 47, 70))
    ]
    x, w, table, dy = map(cupy.asarray, host)
    wide_x, wide_w, wide_table, wide_dy = (one.astype(np.float64) for one in host)
    dw, dtable = cupy.ones((33, 70), np.float32), cupy.ones((70, 33), np.float32)
    ops.matmul_tn_add(x, dy, dw)
    ops.matmul_tn_add(x, dy, dtable.T)
    product = 1.0 + wide_x.reshape(-1, 33).T @ wide_dy.reshape(-1, 70)
    for got, expected in (
        (ops.matmul(x, w), wide_x @ wide_w),
        (ops.matmul(x, table.T), wide_x @ wide_table.T),
        (ops.matmul_nt(dy, w), wide_dy @ wide_w.T),
        (ops.matmul_nt(dy, table.T), wide_dy @ wide_table),
    ):
        assert got.dtype == DTYPES[dtype]
        assert relative(ops.to_host(got), expected) <= BOUNDS[dtype]
    for got, expected in ((dw, product), (dtable, product.T)):
        assert got.dtype == np.float32
        assert relative(ops.to_host(got), expected) <= BOUNDS["float32"]


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_stacked_products(rng, cupy, dtype):
    """Heads of a packed array, transposed and not, into new memory and into a packed array."""
    ops = make("cuda", "float64" if dtype == "float64" else "float32", kernels="plain")
    kind = DTYPES.get(dtype, np.float64)
    host = rng.standard_normal((2, 7, 3, 4, 5)).astype(kind)  # B, T, 3, H, d
    q, k, v = (cupy.asarray(host)[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    wide_q, wide_k, wide_v = (
        host[:, :, i].transpose(0, 2, 1, 3).astype(np.float64) for i in range(3)
    )
    scores = ops._stacked_products(q, k.transpose(0, 1, 3, 2))
    assert scores.dtype == kind
    bound = BOUNDS.get(dtype, 1e-14)
    assert relative(ops.to_host(scores), wide_q @ wide_k.transpose(0, 1, 3, 2)) <= bound
    exact = ops.to_host(scores).astype(np.float64).transpose(0, 1, 3, 2) @ wide_v
    ops._stacked_products(scores.transpose(0, 1, 3, 2), v, q)
    assert relative(ops.to_host(q), exact) <= bound


def test_a_step_with_hand_written_products(cupy):
    """Loss and gradients of a whole model in 16 bits, against cuBLAS: sums in another order."""
    run = {"dtype": "bfloat16", "device": "cuda", "optimizer": "sgd"}
    (loss, norm, *tensors), (own_loss, own_norm, *own_tensors) = (
        step(gemm=gemm, **run) for gemm in WAYS
    )
    assert own_loss == pytest.approx(loss, rel=1e-4)
    assert own_norm == pytest.approx(norm, rel=1e-3)
    for got, expected in zip(own_tensors, tensors, strict=True):
        assert_all_close(got, expected, 2 * BOUNDS["bfloat16"])  # both are rounded


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("--gemm tile", ["--gemm: belongs to --device cuda"]),
        *(
            (f"--gemm tile --device cuda --dtype {name}", [f"--gemm tile with --dtype {name}"])
            for name in ("float32", "float64")
        ),
        ("--kernels fused", ["--kernels fused with --device cpu"]),
        ("--kernels plain", ["--kernels plain with --device cpu"]),
        ("--kernels numpy --device cuda", ["fused or plain on --device cuda"]),
        ("--kernels numba --device cuda", ["--kernels numba with --device cuda"]),
        ("--kernels fused --device cuda --dtype float64", ["--dtype float64"]),
    ],
)
def test_what_does_not_fit_is_refused(words, messages):
    check_refused(words, messages)


def test_a_message_goes_to_the_host_and_back_while_products_run(rng, cupy):
    """On a GPU this is the order of streams as it really is; MPI would be called in between."""
    ops, message = make("cuda", "float64"), rng.standard_normal((300, 700))
    x, y, w = map(ops.asarray, (message, np.zeros_like(message), np.ones((64, 64))))
    ops.synchronize()
    arrived = []
    ops.copies.out(x, arrived.append)
    product = ops.matmul(w, w)
    ops.copies.hand_over(wait=True)
    (host,) = arrived
    assert np.array_equal(host, message)
    ops.copies.use_after(ops.copies.into(host, y))
    ops.scale(y, 2.0)
    assert np.array_equal(ops.to_host(y), 2 * message)
    assert np.all(ops.to_host(product) == 64)


def test_instants_of_a_device_are_times_of_the_host(cupy):
    ops = make("cuda", "float32")
    x, before = ops.zeros((64, 64)), perf_counter_ns()
    marks = [ops.timestamp()]
    for _ in range(3):
        x = ops.matmul(x, x)
        marks.append(ops.timestamp())
    ops.to_floats([ops.sum(x)])
    times, after = ops.nanoseconds(marks), perf_counter_ns()
    assert times == sorted(times)
    assert times[0] < times[-1]
    assert before - 10**6 <= times[0]
    assert times[-1] <= after + 10**6
