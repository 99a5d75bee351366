"""The stand-in for a GPU: what it must show, and what it must refuse."""

import ml_dtypes
import numpy as np
import pytest
from cuda_host import KernelError, run_kernel

pytestmark = pytest.mark.shim
NAMES = (
    "reverse<64>",
    "unwritten<32>",
    "half_waits<64>",
    "sums<96>",
    "one_mma<bf16>",
)


def run(name, grid, block, args, **options):
    run_kernel("trial.cu", name, grid, block, args, together=NAMES, **options)


NO_BARRIER = ("    __syncthreads();\n    x[blockIdx", "    x[blockIdx")


@pytest.mark.parametrize("order", [1, -1])
def test_missing_barrier_gives_nan(order):
    x = np.arange(64, dtype=np.float32)
    run("reverse<64>", (1,), (64,), [x], order=order, edit=NO_BARRIER)
    assert np.isnan(x).sum() == 32


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


def test_copy_that_nobody_waits_for_leaves_nan():
    a, b = np.ones((16, 16), ml_dtypes.bfloat16), np.ones((16, 8), ml_dtypes.bfloat16)
    d = np.zeros((16, 8), np.float32)
    edit = ("    wait_copies<0>();\n", "")
    run("one_mma<bf16>", (1,), (32,), [a, b, d], edit=edit)
    assert np.isnan(d).all()


@pytest.mark.parametrize(
    ("args", "message"), [([np.zeros(64, np.float32), 1], "wrong number"), ([1], "another size")]
)
def test_wrong_arguments_are_refused(args, message):
    with pytest.raises(KernelError, match=message):
        run("reverse<64>", (1,), (64,), args)
