"""The CUDA machine of tests/elsewhere/cuda_machine is as strict as CUDA: a test for each mistake.

On a real GPU most of these mistakes go well most of the time.
"""

import ctypes
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import REPOSITORY

from mpipar.ops import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("CUDA_MACHINE_DEVICE" not in os.environ, reason="not on the CUDA machine"),
]
LIMIT = 60  # seconds for a child
STEP = REPOSITORY / "tests" / "elsewhere" / "cuda_machine" / "step_counts.py"
# Of one step of 12 layers in bfloat16: what may be asked of CUDA at most.
MOST = {
    "launch": 257,
    "product": 147,
    "cudaMalloc": 0,
    "copy to the device": 3,
    "copy to the host": 1,
    "record event": 10,
    "synchronize stream": 1,
    "synchronize event": 0,
    "synchronize device": 0,
    "python_calls": 13300,
}
COUNT = 1 << 10
WIDE_LOAD = r"""
extern "C" __global__ void wide(const float4 *x, float4 *y) { y[threadIdx.x] = x[threadIdx.x]; }
"""
BIG_BLOCK = r"""
extern "C" __global__ void big(float *x) { x[0] = 1; }
"""


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def streams(cupy):
    """Two streams of which neither waits for the other, nor for the default stream."""
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]


def counted(name):
    return ctypes.CDLL("libcudart.so.13").cuda_machine_count(name.encode())


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_event(cupy, streams, waits):
    x = cupy.zeros(COUNT)
    cupy.cuda.get_current_stream().synchronize()
    with streams[0]:
        x += 1
        done = streams[0].record()
    with streams[1]:
        if waits:
            streams[1].wait_event(done)
        y = x + 0
        found = y.get()
    assert np.all(found == 1) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_drain_before_the_host_reads_a_pinned_copy(cupy, streams, waits):
    memory = cupy.cuda.alloc_pinned_memory(8 * COUNT)
    host = np.frombuffer(memory, np.float64, COUNT)
    host[...] = 0
    with streams[0]:
        cupy.ones(COUNT).get(out=host, stream=streams[0], blocking=False)
        if waits:
            streams[0].synchronize()
        assert np.all(host == 1) == waits
        streams[0].synchronize()


@pytest.mark.parametrize("waits", [True, False])
def test_a_block_given_back_too_early(cupy, streams, waits):
    x = cupy.ones(COUNT)
    cupy.cuda.get_current_stream().synchronize()
    with streams[0]:
        y = x + 0
    if waits:
        streams[0].synchronize()
    del x
    cupy.empty(COUNT)  # takes the block again, and has it poisoned
    cupy.cuda.get_current_stream().synchronize()
    with streams[0]:
        assert np.all(y.get() == 1) == waits


def test_memory_is_nan_when_it_is_taken_again(cupy):
    x = cupy.ones(COUNT)
    place = x.data.ptr
    del x
    y = cupy.empty(COUNT)
    assert y.data.ptr == place
    assert np.all(np.isnan(y.get()))


def test_pageable_memory_has_been_read_at_the_call(cupy):
    host = np.ones(COUNT)
    x = cupy.empty(COUNT)
    x.set(host)
    host[...] = 2
    assert np.all(x.get() == 1)


def test_a_mask_reads_the_host_and_where_does_not(cupy):
    x = cupy.arange(COUNT)
    mask = x > 3
    before = counted("copy to the host")
    cupy.where(mask, x, 0)
    assert counted("copy to the host") == before
    x[mask]
    assert counted("copy to the host") > before


@pytest.mark.parametrize("kernels", ["fused", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_host_reads_nothing_of_embeddings_and_loss(cupy, kernels, dtype):
    ops = make("cuda", dtype, kernels=kernels)
    ids, places = ops.asarray(np.arange(60).reshape(2, 30)), ops.asarray(np.arange(30))
    dy, logits = ops.zeros((2, 30, 8)), ops.zeros((60, 10))
    dtable, dplaces = (ops.zeros((30, 8), ops.accum_dtype) for _ in range(2))
    sums = ops.asarray(np.ones((60, 2), ops.accum_dtype))
    names = ("copy to the host", "synchronize stream")
    before = [counted(name) for name in names]
    ops.embedding_backward_weight(ids, dy, dtable, 5)
    ops.position_backward_weight(places, dy, dplaces)
    ops.position_forward(
        ops.embedding_forward(ids, ops.zeros((10, 8)), 5), places, ops.zeros((30, 8))
    )
    ops.cross_entropy_backward_input(logits, ids.reshape(-1), sums, 5, 12, 0.5)
    assert [counted(name) for name in names] == before


def test_shared_memory_beyond_48_kib_must_be_asked_for(cupy):
    x, big = cupy.zeros(1, np.float32), cupy.RawKernel(BIG_BLOCK, "big")
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        big((1,), (1,), (x,), shared_mem=64 << 10)
    big.max_dynamic_shared_size_bytes = 64 << 10
    big((1,), (1,), (x,), shared_mem=64 << 10)
    assert x.get()[0] == 1


def test_a_norm_takes_no_copy_of_the_gradients(cupy):
    ops, taken = make("cuda", "float32"), []
    x = ops.zeros((1 << 16,))
    ops.square_sum(x)  # CuPy compiles at the first call

    class Taken(cupy.cuda.MemoryHook):
        name = "taken"

        def malloc_postprocess(self, *, mem_size, **_):
            taken.append(mem_size)

    with Taken():
        ops.to_floats([ops.square_sum(x)])
    assert 0 < sum(taken) < x.nbytes / 32
    with Taken():
        x.astype(np.float64)
    assert sum(taken) > 2 * x.nbytes, "a copy is seen"


def test_kernels_flush_what_float32_cannot_hold_well(cupy):
    assert np.array_equal((cupy.full(3, 1e-37, np.float32) / 100).get(), np.zeros(3))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ctypes.c_long.from_address(x.data.ptr).value", "the host touched device memory"),
        ("cupy.RawKernel(WIDE_LOAD, 'wide')((1,), (1,), (x[1:], x)); x.get()", "off its alignment"),
        ("cupy.RawKernel(WIDE_LOAD, 'wide')((1,), (1,), (x[-2:].view(), x)); x.get()", "alignment"),
    ],
)
def test_what_ends_the_process(cupy, code, message):
    start = f"import ctypes, cupy; WIDE_LOAD = {WIDE_LOAD!r}; x = cupy.zeros(8, 'f'); "
    done = subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode < 0
    assert message in done.stderr


def test_what_a_step_asks_of_cuda(tmp_path):
    env = os.environ | {"CUDA_MACHINE_NULL": "1", "CUPY_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, STEP], env=env, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    found = json.loads(done.stdout)
    assert {name: most for name, most in MOST.items() if found[name] > most} == {}
