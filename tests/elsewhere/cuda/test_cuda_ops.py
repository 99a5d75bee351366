"""Products of the GPU path: cuBLAS's calling rules, and the hand-written kernels.

Tests marked gpu run on a GPU, and in CI on the CUDA machine: the real CuPy on a CPU.
"""

from functools import partial
from time import perf_counter_ns

import ml_dtypes
import numpy as np
import pytest
from config_helpers import changed, check_refused, reading_of
from helpers import assert_all_close, assert_close
from ops_cases import LARGE, SMALL, call_every_op, plain

from mpipar.comm.grid import Grid
from mpipar.config.resolve import resolve
from mpipar.ops import make
from mpipar.ops.cuda.gemm_tile import TileGemm, fitting
from mpipar.ops.mixed_ops import MixedOps
from mpipar.run.console.tables import headline
from mpipar.run.resolve import resolve as resolve_typed
from mpipar.run.verify import step_tensors

BOUNDS = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
WAYS = ["blas", "tile"]


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


def check_every_function(ops, sizes, tol):
    expected = call_every_op(plain("float64"), sizes)
    for name, value in call_every_op(ops, sizes).items():
        assert_close(
            value if isinstance(value, float) else ops.to_host(value), expected[name], tol, name
        )


def test_every_function_equals_plain(cupy):
    check_every_function(make("cuda", "float32", kernels="plain"), LARGE, 2e-5)


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


def test_float64_goes_to_cublas(cupy):
    check_every_function(make("cuda", "float64"), SMALL, 1e-12)


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


def relative(on_host, expected):
    return np.linalg.norm(on_host.astype(np.float64) - expected) / np.linalg.norm(expected)


def test_a_step_with_hand_written_products(cupy):
    """Loss and gradients of a whole model in 16 bits, against cuBLAS: sums in another order."""
    shape = {
        "layers": 2,
        "d_model": 12,
        "heads": 3,
        "ffn": 20,
        "seq_len": 6,
        "vocab_size": 17,
        "batch_size": 4,
        "num_microbatches": 2,
        "optimizer": "sgd",
    }
    tokens = np.random.default_rng(1).integers(0, 17, 200)
    results = []
    for gemm in ("blas", "tile"):
        config, _ = resolve(changed(**shape, dtype="bfloat16", device="cuda", gemm=gemm), 1)
        results.append(step_tensors(config, tokens, Grid(0)))
    (loss, norm, *tensors), (own_loss, own_norm, *own_tensors) = results
    assert own_loss == pytest.approx(loss, rel=1e-4)
    assert own_norm == pytest.approx(norm, rel=1e-3)
    for got, expected in zip(own_tensors, tensors, strict=True):
        assert_all_close(got, expected, 2 * BOUNDS["bfloat16"])  # both are rounded


def test_sizes_that_a_gpu_might_see():
    """Large products take the large tiles, small ones the small tiles; each is one call."""
    calls = []

    class Loader:
        def launch(self, file, name, grid, block, arguments, shared_bytes):
            calls.append((name, grid, block, shared_bytes, arguments[:3]))

    gemm = TileGemm(Loader(), partial(fitting, 132))
    for rows in (4096, 200):
        a, b = np.empty((rows, 64), np.float16), np.empty((64, 2048), np.float16)
        gemm(a, b, np.empty((rows, 2048), np.float32))
    name = "gemm_mma<half, float, false, false"
    assert calls == [
        (f"{name}, 128, 128, 32, 64, 32, 3>", (32, 16), (256,), 56832, (4096, 2048, 64)),
        (f"{name}, 64, 64, 32, 32, 32, 3>", (4, 32), (128,), 29184, (200, 2048, 64)),
    ]


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("--gemm tile", ["--gemm: belongs to --device cuda"]),
        *(
            (f"--gemm tile --device cuda --dtype {name}", [f"--gemm tile with --dtype {name}"])
            for name in ("float32", "float64")
        ),
    ],
)
def test_what_does_not_fit_is_refused(words, messages):
    check_refused(words, messages)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "--gemm tile --device cuda --dtype bfloat16",
            "bfloat16 on cuda, products by tile kernels",
        ),
        ("", "float32 on cpu"),
    ],
)
def test_how_products_are_computed_is_printed(words, text):
    config, _ = resolve_typed(reading_of(*words.split()), 1)
    assert headline(config, 1, 1, 1).splitlines()[0].endswith(text)


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
