"""The array functions with 16-bit activations: one rounding each, every sum in float32."""

import math

import numpy as np
import pytest
from helpers import assert_close
from ops_cases import ADAMW, LARGE, OPERANDS, SMALL, call_every_op, check_every_op, parts

from mpipar.comm.groups import Comms
from mpipar.layers.context import Context
from mpipar.layers.flat import FlatParams
from mpipar.layers.param import Param
from mpipar.ops import make
from mpipar.ops.mixed_ops import DTYPES

FLOAT32 = 2e-5


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


def close(got, expected, roundings, name):
    assert_close(got, expected, roundings + FLOAT32, name)


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_every_function_rounds_once_and_adds_up_in_float32(dtype, sizes):
    check_every_op(make("cpu", dtype), sizes, close)


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "further"), [("fused", OPERANDS), ("plain", {})])
def test_every_function_rounds_once_on_the_gpu(cupy, dtype, kernels, further):
    """Attention's probabilities and their gradients are operands of products: rounded too."""
    check_every_op(make("cuda", dtype, kernels=kernels), LARGE, close, further)


def test_what_is_rounded_and_what_is_not(dtype):
    ops = make("cpu", dtype)
    results = call_every_op(ops)
    wide = {
        name
        for name, value in results.items()
        if not isinstance(value, float) and value.dtype == np.float32
    }
    words = (
        "weight",
        "tn_add",
        " mean",
        "rstd",
        "sgd",
        "sign_step",
        "adamw",
        "combine",
        "scale",
        "block",
        "merge",
        "delta",
        "router_forward",
        "choice",
        "balance",
        "loads",
        "excess",
        "dots",
        "cross_entropy_forward",
    )
    others = ("_rows", "_order", " ids")  # of activations, and of integers
    assert wide == {
        name
        for name in results
        if any(word in name for word in words) and not any(word in name for word in others)
    }
    assert (ops.dtype, ops.accum_dtype) == (DTYPES[dtype], np.float32)


def test_what_the_table_does_not_name_is_an_error(dtype):
    """It is never a silent float32, whatever the wrapped functions have."""
    ops = make("cpu", dtype)
    ops.exact.stacked = lambda x: x
    for name in ("stacked", "stacked_products", "kernels", "gelu"):
        with pytest.raises(AttributeError, match=f"{name}: the table of functions does not say"):
            getattr(ops, name)


def test_layernorm_takes_its_mean_in_float32():
    """257 is not a bfloat16 number: with a mean of 256 or 258 half of the row would be 0."""
    ops = make("cpu", "bfloat16")
    x = np.array([[256, 258, 256, 258]]).astype(ops.dtype)
    one, zero = np.ones(4).astype(ops.dtype), np.zeros(4).astype(ops.dtype)
    y, mean, rstd = ops.layernorm_forward(x, one, zero, 0.0)
    assert (mean[0], rstd[0]) == (257, 1)
    assert y.tolist() == [[-1, 1, -1, 1]]


def test_softmax_and_loss_add_up_in_float32():
    """256 + 1 = 256 in bfloat16: a sum of ones would stop there."""
    ops = make("cpu", "bfloat16")
    logits = np.zeros((1, 1000)).astype(ops.dtype)
    stats = ops.cross_entropy_forward(logits, np.array([3]), 0, 1000)
    loss, _ = ops.cross_entropy_combine(stats[None])
    assert loss[0] == pytest.approx(math.log(1000), rel=1e-6)
    qkv = np.zeros((1, 300, 3, 1, 2)).astype(ops.dtype)
    _, probs = ops.attention_forward(*parts(qkv), np.arange(300), np.arange(300))
    assert probs[0, 0, -1, 0] == np.float64(1 / 300).astype(ops.dtype) != 1 / 256
    db = np.zeros(2, np.float32)
    ops.bias_backward_weight(np.ones((1, 300, 2)).astype(ops.dtype), db)
    assert db.tolist() == [300, 300]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("length", [5, 8, 100_001])
def test_parts_of_a_sum_are_added_in_order_in_float32_and_rounded_once(dtype, length):
    """To the bit, also of zeros and numbers that are not finite, in several tiles."""
    ops, rng = make("cpu", dtype), np.random.default_rng(length)
    wide = rng.standard_normal((3, length)) * 10.0 ** rng.integers(-8, 3, (3, length))
    parts = wide.astype(ops.dtype)
    parts[:, :2] = -0.0
    parts[1, 2:5] = np.nan, np.inf, -np.inf
    exact = parts.astype(np.float32).sum(axis=0).astype(ops.dtype)
    total = np.full(length, np.nan).astype(ops.dtype)
    for found in (ops.add_parts(parts), ops.add_parts(parts, total), total):
        assert found.tobytes() == exact.tobytes()


@pytest.mark.filterwarnings("error")
def test_float16_beyond_its_range_is_infinite_without_a_warning():
    ops = make("cpu", "float16")
    big = np.full((2, 2), 6e4).astype(np.float16)
    assert np.isinf(ops.matmul(big, big)).all()
    assert np.isinf(ops.add_parts(big)).all()
    assert np.isinf(ops.accumulate(big.copy(), big)).all()


# --- the update rounds as a resumed run does


def assert_update_rounds_as_publish(ops, rng, smallest=0.0):
    """A resumed run makes the layers' data by a copy; the run before it made them in the update.

    Numbers of all sizes from `smallest` on, half of them just between two of 16 bits.
    """
    bits = rng.integers(0, 1 << 32, 4096, dtype=np.uint32)
    bits[::2] = bits[::2] & 0xFFFF0000 | rng.choice([0x8000, 0x7FFF, 0x8001], 2048)
    half = np.arange(-3000, 3000) * 2.0**-12 + 1 + 2.0**-11  # of float16
    edges = np.array([*half, 0.0, -0.0, 65519.9, 65520, 1e-8], np.float32)
    numbers = np.concatenate([bits.view(np.float32), edges])
    numbers = numbers[np.isfinite(numbers) & ((numbers == 0) | (abs(numbers) >= smallest))]
    param = Param(Context(ops, Comms.solo(ops)), "x", numbers.shape)
    flat = FlatParams(ops, [param])
    ops.copy(flat.master, ops.asarray(numbers))
    grad, m, v = (ops.zeros(numbers.shape, ops.accum_dtype) for _ in range(3))
    runs = [(False, slice(0, len(numbers)))]
    ops.adamw_runs(flat.master, grad, m, v, runs, ADAMW, flat.data)
    updated = ops.to_host(flat.data).tobytes()
    assert ops.to_host(flat.master).tobytes() == numbers.tobytes()  # nothing moved the halves
    flat.copy_master_to_params()
    assert len(set(numbers.tolist())) > 5000
    assert ops.to_host(flat.data).tobytes() == updated


@pytest.mark.parametrize("kernels", ["numpy", pytest.param("numba", marks=pytest.mark.numba)])
def test_the_update_rounds_as_a_resumed_run(dtype, kernels, rng):
    assert_update_rounds_as_publish(make("cpu", dtype, kernels=kernels), rng)


@pytest.mark.parametrize("kernels", ["fused", "plain"])
def test_the_update_rounds_as_a_resumed_run_on_the_gpu(cupy, dtype, kernels, rng):
    ops = make("cuda", dtype, kernels=kernels)
    assert_update_rounds_as_publish(ops, rng, np.finfo(np.float32).tiny)  # CuPy flushes below it
