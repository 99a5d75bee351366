"""The stand-in for a GPU: barriers, shuffles, tensor-core products, and what it must refuse."""

import ml_dtypes
import numpy as np
import pytest
from cuda_host import KernelError, run_kernel, run_sanitized

pytestmark = pytest.mark.shim
DTYPES = {"bf16": ml_dtypes.bfloat16, "half": np.float16}
NAMES = (
    "reverse<64>",
    "unwritten<32>",
    "half_waits<64>",
    "sums<96>",
    "shuffles<32>",
    "shuffles<16>",
    "one_mma<bf16>",
    "one_mma<half>",
    "count<float>",
    "round_trip<bf16>",
    "round_trip<half>",
)


def run(name, grid, block, args, **options):
    run_kernel("trial.cu", name, grid, block, args, together=NAMES, **options)


@pytest.mark.parametrize("order", [1, -1])
def test_barrier_lets_all_write_first(order):
    x = np.arange(192, dtype=np.float32)
    run("reverse<64>", (3,), (64,), [x], order=order)
    assert np.array_equal(x, np.arange(192).reshape(3, 64)[:, ::-1].ravel())


NO_BARRIER = ("    __syncthreads();\n    x[blockIdx", "    x[blockIdx")


@pytest.mark.parametrize("order", [1, -1])
def test_missing_barrier_gives_nan(order):
    x = np.arange(64, dtype=np.float32)
    run("reverse<64>", (1,), (64,), [x], order=order, edit=NO_BARRIER)
    assert np.isnan(x).sum() == 32


@pytest.mark.slow
def test_thread_sanitizer_sees_the_missing_barrier():
    x = np.arange(64, dtype=np.float32)
    assert run_sanitized("thread", "trial.cu", "reverse<64>", (1,), (64,), [x]) == (0, "")
    code, text = run_sanitized(
        "thread", "trial.cu", "reverse<64>", (1,), (64,), [x], edit=NO_BARRIER
    )
    assert code
    assert "data race" in text
    assert "trial.cu:9 in void reverse<64>" in text


@pytest.mark.slow
def test_thread_sanitizer_sees_a_race_however_late_the_reader_is():
    x, y = np.zeros((2, 32), np.float32)
    code, text = run_sanitized("thread", "trial.cu", "late_reader<200000000>", (1,), (64,), [x, y])
    assert code
    assert "data race" in text


@pytest.mark.slow
def test_address_sanitizer_sees_one_element_too_far():
    for size, caught in ((64, False), (63, True)):
        x = np.arange(size, dtype=np.float32)
        code, text = run_sanitized("address", "trial.cu", "reverse<64>", (1,), (64,), [x])
        assert bool(code) is caught, text
        assert ("heap-buffer-overflow" in text) is caught


def test_unwritten_shared_memory_is_nan_in_every_block():
    fixed, dynamic = np.zeros((2, 32), np.float32)
    run("unwritten<32>", (3,), (32,), [fixed, dynamic], shared_bytes=128)
    assert np.isnan(fixed).all()
    assert np.isnan(dynamic).all()


def test_a_barrier_for_half_of_the_threads_is_refused():
    with pytest.raises(KernelError, match="a barrier that not all threads reach"):
        run("half_waits<64>", (1,), (64,), [np.zeros(64, np.float32)])


# The barrier of block_fold before the next warps' values are written.
BEFORE_WRITES = ("    __syncthreads();\n    if (threadIdx.x % 32", "    if (threadIdx.x % 32")


def test_a_second_sum_waits_for_the_readers_of_the_first(rng):
    x = rng.standard_normal((1, 3, 32)).astype(np.float32)
    found = []
    for order in (1, -1):
        for edit in (None, BEFORE_WRITES):
            block, warp, top = np.zeros((3, *x.shape), np.float32)
            run("sums<96>", (1,), (96,), [x, block, warp, top], order=order, edit=edit)
            found.append(np.allclose(block, x.sum(), rtol=1e-5, atol=1e-5))
    assert found[::2] == [True, True]
    assert not all(found[1::2])


def test_sums_over_warps_and_blocks(rng):
    x = rng.standard_normal((2, 3, 32)).astype(np.float32)
    block, warp, top = np.zeros((3, *x.shape), np.float32)
    run("sums<96>", (2,), (96,), [x, block, warp, top])
    wide = np.broadcast_to(x.sum(axis=(1, 2), keepdims=True), x.shape)
    np.testing.assert_allclose(block, wide, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        warp, np.broadcast_to(x.sum(-1, keepdims=True), x.shape), rtol=1e-5, atol=1e-5
    )
    assert np.array_equal(top, np.broadcast_to(x.max(-1, keepdims=True), x.shape))


@pytest.mark.parametrize("lanes", [32, 16])
def test_shuffles(lanes):
    x = np.arange(32, dtype=np.int32) ** 2
    up, down, one = np.zeros((3, 32), np.int32)
    run(f"shuffles<{lanes}>", (1,), (32,), [x, up, down, one])
    lane = np.arange(32)
    start = lane // lanes * lanes
    assert np.array_equal(up, x[np.where(lane % lanes >= 3, lane - 3, lane)])
    assert np.array_equal(down, x[np.where(lane % lanes + 3 < lanes, (lane + 3) % 32, lane)])
    assert np.array_equal(one, x[start + 5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_core_product(rng, dtype):
    a = rng.standard_normal((16, 16)).astype(DTYPES[dtype])
    b = rng.standard_normal((16, 8)).astype(DTYPES[dtype])
    d = np.full((16, 8), np.nan, np.float32)
    run(f"one_mma<{dtype}>", (1,), (32,), [a, b, d])
    np.testing.assert_allclose(d, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_copy_that_nobody_waits_for_leaves_nan(rng):
    a, b = np.ones((16, 16), DTYPES["bf16"]), np.ones((16, 8), DTYPES["bf16"])
    d = np.zeros((16, 8), np.float32)
    edit = ("    wait_copies<0>();\n", "")
    run("one_mma<bf16>", (1,), (32,), [a, b, d], edit=edit)
    assert np.isnan(d).all()


def test_atomic_add(rng):
    bins = rng.integers(0, 5, 100).astype(np.int32)
    counts = np.zeros(5, np.float32)
    run("count<float>", (4,), (32,), [bins, 100, counts])
    assert np.array_equal(counts, np.bincount(bins, minlength=5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_16_bits_is_that_of_numpy(rng, dtype):
    x = (rng.standard_normal(512) * 10.0 ** rng.integers(-9, 6, 512)).astype(np.float32)
    x[:4] = 0.0, np.inf, -np.inf, np.nan
    y, back = np.zeros(512, DTYPES[dtype]), np.zeros(512, np.float32)
    run(f"round_trip<{dtype}>", (1,), (512,), [x, y, back])
    with np.errstate(over="ignore"):
        expected = x.astype(DTYPES[dtype])
    assert np.array_equal(y.view(np.uint16)[:3], expected.view(np.uint16)[:3])
    assert np.array_equal(back, expected.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("args", "message"), [([np.zeros(64, np.float32), 1], "wrong number"), ([1], "another size")]
)
def test_wrong_arguments_are_refused(args, message):
    with pytest.raises(KernelError, match=message):
        run("reverse<64>", (1,), (64,), args)
