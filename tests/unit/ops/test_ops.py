"""Array functions on numbers: against finite differences, each other, and themselves in shards."""

import numpy as np
import pytest
from attention_cases import Case
from helpers import assert_close
from ops_cases import (
    ADAMW,
    LARGE,
    SMALL,
    call_every_op,
    numeric_gradient,
    parts,
    plain,
    runs_of,
)

from mpipar.comm.recorder import Recorder
from mpipar.ops import make, numpy_attention, numpy_ops
from mpipar.ops.array_attention import rope_frequencies, rope_table
from mpipar.ops.functions import FUNCTIONS
from mpipar.ops.timed_ops import TimedOps

DIFFERENCES = 1e-6


COMPILED = pytest.param("numba", marks=pytest.mark.numba)


def implementation_of(name, dtype="float64"):
    """Return the array functions of that name."""
    kernels = "numba" if name == "numba" else "numpy"
    return plain(dtype) if name == "plain" else make("cpu", dtype, kernels=kernels)


@pytest.fixture(params=["plain", "tuned", "tuned in tiny tiles", COMPILED])
def ops(request, monkeypatch):
    """An implementation in float64; tiny tiles make small arrays cross every tile border."""
    if request.param == "tuned in tiny tiles":
        monkeypatch.setattr(numpy_ops, "TILE", 16)
        monkeypatch.setattr(numpy_attention, "QUERY_TILE", 2)
        monkeypatch.setattr(numpy_attention, "PART_SCORES", 8)
    return implementation_of(request.param)


def functions_called(run):
    """The names of the array functions that run(ops) calls."""
    recorder = Recorder()
    ops = TimedOps(plain(), recorder)
    ops.active = True
    run(ops)
    return {function for _, function, *_ in recorder.operations}


def test_every_function_is_called():
    """Except the checksum, which is of the bits: those of each type are others."""
    assert functions_called(call_every_op) == FUNCTIONS.keys() - {"checksum"}


# Gradients and differences. Each function returns one for the terms of a loss, and the arrays that
# it reads, each with the gradient by the functions of the backward pass.


def added(like, add):
    """What a function adds to a gradient, which may hold something."""
    out = np.ones_like(like)
    add(out)
    return out - 1


def product(ops, rng):
    x, w, b = rng.standard_normal((2, 3, 5)), rng.standard_normal((5, 7)), rng.standard_normal(7)
    dy = rng.standard_normal((2, 3, 7))
    return lambda: ops.bias_forward(ops.matmul(x, w), b) * dy, [
        (x, ops.matmul_nt(dy, w)),
        (w, added(w, lambda dw: ops.matmul_tn_add(x, dy, dw))),
        (b, added(b, lambda db: ops.bias_backward_weight(dy, db))),
    ]


def grouped_product(ops, rng):
    x, w, counts = rng.standard_normal((6, 3)), rng.standard_normal((3, 3, 4)), [2, 0, 4]
    dy = rng.standard_normal((6, 4))
    return lambda: ops.grouped_matmul(x, w, counts) * dy, [
        (x, ops.grouped_matmul_nt(dy, w, counts)),
        (w, added(w, lambda dw: ops.grouped_matmul_tn_add(x, dy, dw, counts))),
    ]


def gelu(ops, rng):
    x, dy = 2 * rng.standard_normal((3, 5, 7)), rng.standard_normal((3, 5, 7))
    return lambda: ops.gelu_forward(x) * dy, [(x, ops.gelu_backward_input(dy, x))]


def swiglu(ops, rng):
    h, dy = 2 * rng.standard_normal((3, 5, 2, 7)), rng.standard_normal((3, 5, 7))
    return lambda: ops.swiglu_forward(h) * dy, [(h, ops.swiglu_backward_input(dy, h)[0])]


def layernorm(ops, rng):
    x, dy = rng.standard_normal((3, 5, 7)) + 2.0, rng.standard_normal((3, 5, 7))
    w, b = rng.standard_normal((2, 7))
    _, *kept = ops.layernorm_forward(x, w, b, 1e-3)
    dw, db = added(np.stack([w, b]), lambda out: ops.layernorm_backward_weight(dy, x, *kept, *out))
    return lambda: ops.layernorm_forward(x, w, b, 1e-3)[0] * dy, [
        (x, ops.layernorm_backward_input(dy, x, w, *kept)),
        (w, dw),
        (b, db),
    ]


def rmsnorm(ops, rng):
    x, dy = rng.standard_normal((3, 5, 7)) + 2.0, rng.standard_normal((3, 5, 7))
    w = rng.standard_normal(7)
    _, rstd = ops.rmsnorm_forward(x, w, 1e-3)
    return lambda: ops.rmsnorm_forward(x, w, 1e-3)[0] * dy, [
        (x, ops.rmsnorm_backward_input(dy, x, w, rstd)),
        (w, added(w, lambda dw: ops.rmsnorm_backward_weight(dy, x, rstd, dw))),
    ]


def embedding(ops, rng):
    ids, at = rng.integers(0, 9, (2, 5)), np.array([6, 0, 3, 1, 4])
    dy = rng.standard_normal((2, 5, 3))
    table, places = rng.standard_normal((4, 3)), rng.standard_normal((7, 3))
    return lambda: ops.position_forward(ops.embedding_forward(ids, table, 3), at, places) * dy, [
        (table, added(table, lambda out: ops.embedding_backward_weight(ids, dy, out, 3))),
        (places, added(places, lambda out: ops.position_backward_weight(at, dy, out))),
    ]


def cross_entropy(ops, rng):
    logits, targets = rng.standard_normal((5, 9)), rng.integers(0, 9, 5)
    _, dlogits = padded_loss(ops, logits, targets, 9, 3, 0.25)
    return lambda: 0.25 * padded_loss(ops, logits, targets, 9, 3, 0.25)[0], [(logits, dlogits)]


def turned(ops, x, positions, table, function="rope_forward"):
    """A turned copy of x."""
    x = x.copy()
    assert getattr(ops, function)(x, positions, table) is x
    return x


def rope(ops, rng):
    x, dy = rng.standard_normal((2, 2, 5, 3, 6))
    turns = np.array([7, 0, 3, 4, 1]), rope_table(8, 6, 10.0, ())
    return lambda: turned(ops, x, *turns) * dy, [
        (x, turned(ops, dy, *turns, "rope_backward_input"))
    ]


def attention(ops, rng, form="saved", function="attention_forward"):
    """With two query heads per key head; query 0 sees no key."""
    case = Case(rng, (2, 3, 5, 4, 2, 3), (np.arange(3) * 3, np.arange(5) * 2 + 1))
    q_k_pos = case.q_pos, case.k_pos
    return lambda: getattr(ops, function)(*case.qkv, *q_k_pos)[0] * case.dy, [
        *zip(case.qkv, getattr(case, form)(ops)[2:], strict=True)
    ]


def attention_block(ops, rng):
    return attention(ops, rng, "block", "attention_block_forward")


def router(ops, rng):
    x, w, dlogits = (rng.standard_normal(shape) for shape in ((5, 4), (3, 4), (5, 3)))
    return lambda: ops.router_forward(x, w) * dlogits, [
        (x, ops.router_backward_input(dlogits, w)),
        (w, added(w, lambda dw: ops.router_backward_weight(dlogits, x, dw))),
    ]


def choice(ops, rng):
    logits, dprobs = rng.standard_normal((5, 4)), rng.standard_normal((5, 2))
    ids, probs = ops.choice_forward(logits, 2)
    return lambda: ops.choice_forward(logits, 2)[1] * dprobs, [
        (logits, ops.choice_backward_input(dprobs, probs, ids, 4))
    ]


def balance(ops, rng):
    logits, loads = rng.standard_normal((2, 3, 4)), rng.uniform(0, 3, (2, 4))

    def terms():
        return 0.3 * loads[:, None] * np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)

    add = ops.balance_backward_input
    return terms, [(logits, added(logits, lambda out: add(out, logits, loads, 0.3)))]


GRADIENTS = (
    product, grouped_product, gelu, swiglu, layernorm, rmsnorm, embedding, cross_entropy, rope,
    attention, attention_block, router, choice, balance,
)  # fmt: skip


@pytest.mark.parametrize("gradients", GRADIENTS, ids=lambda one: one.__name__)
def test_gradients_are_differences(ops, rng, gradients):
    terms, found = gradients(ops, rng)
    for number, (x, gradient) in enumerate(found):
        numeric = numeric_gradient(lambda: float(terms().sum()), x)
        assert_close(gradient, numeric, DIFFERENCES, f"gradient {number}")


def test_every_gradient_is_compared_with_differences(rng):
    """That of each function whose name says that it belongs to a pass."""
    called = functions_called(lambda ops: [one(ops, rng)[0]() for one in GRADIENTS])
    of_a_pass = {name for name in FUNCTIONS if "_forward" in name or "_backward" in name}
    assert of_a_pass - called == {"top_forward"}  # no loss reads the largest logits


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_embedding_shards_add_up(ops, rng, shards):
    table, ids = rng.standard_normal((12, 3)), rng.integers(0, 12, (2, 5))
    rows = 12 // shards
    parts = [
        ops.embedding_forward(ids, table[start : start + rows].copy(), start)
        for start in range(0, 12, rows)
    ]
    assert np.array_equal(sum(parts), table[ids])


def padded_loss(ops, logits, targets, num_valid, shards, scale):
    """Loss and logit gradients (padding included) with the padded vocabulary in shards."""
    width = logits.shape[1] // shards
    starts = range(0, logits.shape[1], width)
    parts = [logits[:, start : start + width].copy() for start in starts]
    stats = np.stack(
        [
            ops.cross_entropy_forward(part, targets, start, num_valid)
            for part, start in zip(parts, starts, strict=True)
        ]
    )
    loss, sums = ops.cross_entropy_combine(stats)
    for part, start in zip(parts, starts, strict=True):
        out = ops.cross_entropy_backward_input(part, targets, sums, start, num_valid, scale)
        assert out is part, "the gradient is written over the logits"
    return loss, np.concatenate(parts, axis=1)


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_cross_entropy_over_vocabulary_shards(ops, rng, shards):
    """With 7 of 12 columns valid, the last of three shards and of four are all padding."""
    num_valid, count = 7, 5
    logits = 3.0 * rng.standard_normal((count, 12))
    logits[:, num_valid:] = 1e3  # padding would win if it were read
    targets = rng.integers(0, num_valid, count)

    def loss():
        valid = logits[:, :num_valid]
        peak = valid.max(axis=1)
        lse = peak + np.log(np.exp(valid - peak[:, None]).sum(axis=1))
        return lse - valid[np.arange(count), targets]

    got, dlogits = padded_loss(ops, logits, targets, num_valid, shards, 0.25)
    assert_close(got, loss(), 1e-13, "loss")
    numeric = numeric_gradient(lambda: float(loss().sum()) * 0.25, logits)
    assert_close(dlogits, numeric, DIFFERENCES, "dlogits")
    assert not dlogits[:, num_valid:].any()


def test_shard_of_padding_only(ops):
    stats = ops.cross_entropy_forward(np.full((2, 3), np.nan), np.array([0, 1]), 6, 5)
    assert np.array_equal(stats, [[np.finfo(np.float64).min, 0.0, 0.0]] * 2)
    best = ops.top_forward(np.full((2, 3), np.nan), 6, 5, 2)
    assert np.array_equal(best, [[[-np.inf, 6.0]] * 2] * 2)


def test_the_lowest_of_equals_comes_first(ops):
    logits = np.array([[1.0, 5.0, 5.0, 2.0, 5.0, 9.0], [3.0, 3.0, 3.0, 3.0, 3.0, 9.0]])
    parts = [ops.top_forward(logits[:, s : s + 2].copy(), s, 5, 2) for s in (0, 2, 4)]
    assert np.array_equal(parts[0], [[[5.0, 1.0], [1.0, 0.0]], [[3.0, 0.0], [3.0, 1.0]]])
    assert np.array_equal(parts[1], [[[5.0, 2.0], [2.0, 3.0]], [[3.0, 2.0], [3.0, 3.0]]])
    assert np.array_equal(parts[2][:, 0], [[5.0, 4.0], [3.0, 4.0]])
    assert np.isneginf(parts[2][:, 1, 0]).all(), "the shard has no second column"
    for count in (1, 2, 3, 4, 5):
        best = ops.top_forward(logits, 0, 5, count)
        order = np.lexsort((np.tile(np.arange(5), (2, 1)), -logits[:, :5]))[:, :count]
        assert np.array_equal(best[..., 1], order)
        assert np.array_equal(best[..., 0], np.take_along_axis(logits, order, 1))


@pytest.mark.parametrize("kind", ["increasing", "shuffled", "ties"])
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("implementation", ["tuned", COMPILED])
def test_tuned_equals_plain(monkeypatch, implementation, sizes, kind):
    monkeypatch.setattr(numpy_ops, "TILE", 4096)
    monkeypatch.setattr(numpy_ops, "PRODUCT_TILE", 1)  # 64 rows of a weight gradient at a time
    expected = call_every_op(plain(), sizes, kind)
    for name, value in call_every_op(implementation_of(implementation), sizes, kind).items():
        assert_close(value, expected[name], 1e-12, name)


@pytest.mark.parametrize("implementation", ["plain", "tuned", COMPILED])
def test_float32_stays_float32_and_is_close(implementation):
    ops = implementation_of(implementation, "float32")
    expected = call_every_op(plain("float64"), LARGE)
    for name, value in call_every_op(ops, LARGE).items():
        if not isinstance(value, float) and value.dtype != np.int64 and name[:3] != "top":
            assert value.dtype == np.float32, name
        assert_close(value, expected[name], 2e-5, name)


@pytest.mark.parametrize("implementation", ["plain", "tuned", COMPILED])
def test_no_result_depends_on_what_was_in_the_memory(monkeypatch, implementation):
    ops = implementation_of(implementation)
    expected = call_every_op(ops, LARGE)

    def poisoned(shape, dtype=float):
        return np.full(shape, np.nan if np.dtype(dtype).kind == "f" else -7, dtype)

    monkeypatch.setattr(np, "empty", poisoned)
    monkeypatch.setattr(np, "empty_like", lambda x: poisoned(x.shape, x.dtype))
    fresh = implementation_of(implementation)
    for name, value in call_every_op(fresh, LARGE).items():
        # Not bit for bit: vector loops may start elsewhere in an array that lies elsewhere.
        assert_close(value, expected[name], 1e-13, name)


def test_a_result_survives_the_next_call(ops):
    """No result may live in a buffer that the next call of the same function overwrites."""
    first = call_every_op(ops, SMALL)
    kept = {name: np.copy(value) for name, value in first.items()}
    call_every_op(ops, SMALL, seed=6)
    for name, value in first.items():
        assert np.array_equal(value, kept[name]), name


def test_nan_is_not_swallowed(ops, rng):
    x = rng.standard_normal((2, 5, 6))
    x[1, 0, 2] = np.nan
    assert np.isnan(ops.gelu_forward(x)[1, 0, 2])
    assert np.isnan(ops.gelu_backward_input(np.ones_like(x), x)[1, 0, 2])
    assert np.isnan(ops.layernorm_forward(x, np.ones(6), np.zeros(6), 1e-5)[0][1, 0]).all()
    assert np.isnan(ops.matmul(x, np.ones((6, 3)))[1, 0]).all()
    assert np.isnan(ops.sum(x))
    assert np.isnan(ops.square_sum(x))
    qkv = np.repeat(x[:, :, None, None, :], 3, axis=2)
    y, _ = ops.attention_forward(*parts(qkv), np.arange(5), np.arange(5))
    assert np.isnan(y[1]).any(axis=(1, 2)).all()
    logits = x.reshape(10, 6)
    stats = ops.cross_entropy_forward(logits, np.zeros(10, np.int64), 0, 6)
    loss, _ = ops.cross_entropy_combine(stats[None])
    assert np.array_equal(np.isnan(loss), np.arange(10) == 5)
    assert all(np.isnan(ops.top_forward(logits, 0, 6, count)[5, 0, 0]) for count in (1, 3))


@pytest.mark.parametrize("name", ["plain", "tuned", COMPILED])
@pytest.mark.parametrize("largest", [1.0, 1e25])
def test_a_sum_of_squares_has_float64(name, largest, rng):
    ops = implementation_of(name, "float32")
    for size in (1, 255, 256, 70_001):
        x = (rng.standard_normal(size) * largest).astype(np.float32)
        exact = float(np.square(x.astype(np.float64)).sum())
        assert_close(ops.square_sum(x), exact, 1e-7, f"{size} numbers")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_checksum_changes_with_every_bit(dtype, rng):
    ops = implementation_of("numpy", dtype)
    ops.checksum_block = 16  # several blocks, the last one cut
    x = rng.standard_normal((9, 5)).astype(dtype)
    x[0, :2] = 0.0, np.nan
    words, seen = x.reshape(-1).view(np.uint32), {ops.checksum(x)}
    for word in range(words.size):
        for bit in range(32):
            words[word] ^= 1 << bit
            seen.add(ops.checksum(x))
            words[word] ^= 1 << bit
    assert len(seen) == 1 + 32 * words.size
    assert ops.checksum(x) == ops.checksum(x.copy()) in seen
    assert max(seen) < 2**64
    for first, second in ((2, 3), (2, 20), (4, 36)):  # in one block, and in two
        y = x.copy().reshape(-1)
        y[[first, second]] = y[[second, first]]
        assert ops.checksum(y) not in seen


def test_in_place_functions_return_their_argument(ops, rng):
    x, y, b = rng.standard_normal((3, 5)), rng.standard_normal((3, 5)), rng.standard_normal(5)
    expected = (x + y) * 0.5 + b
    assert ops.accumulate(x, y) is x
    assert ops.scale(x, 0.5) is x
    assert ops.bias_forward(x, b) is x
    assert_close(x, expected, 1e-15, "x")


def test_adamw_of_runs_is_the_formula_with_a_decay_for_each_number(ops, rng):
    runs, decay = runs_of(101), np.zeros(101)
    for decays, run in runs:
        decay[run] = 0.3 * decays
    data, grad, m, v = (rng.uniform(0.5, 2.0, 101) for _ in range(4))
    first, second = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
    root = np.sqrt(second / (1 - 0.95**3)) + 1e-8
    expected = data * (1 - 0.01 * decay) - 0.01 * first / (1 - 0.9**3) / root
    ops.adamw_runs(data, grad, m, v, runs, ADAMW._replace(weight_decay=0.3))
    for one, wanted in ((data, expected), (m, first), (v, second)):
        assert_close(one, wanted, 1e-12, "AdamW")


def test_accumulating_another_shape_is_refused(ops):
    with pytest.raises(AssertionError, match=r"\(3, 5\), \(5,\)"):
        ops.accumulate(np.zeros((3, 5)), np.zeros(5))
    with pytest.raises(AssertionError, match=r"\(3, 5\), \(3, 1\)"):
        ops.copy(np.zeros((3, 5)), np.zeros((3, 1)))


# SwiGLU and rotary positions.


def test_swiglu_is_its_formula(ops, rng):
    h, dy = 2 * rng.standard_normal((3, 5, 2, 7)), rng.standard_normal((3, 5, 7))
    y = ops.swiglu_backward_input(dy, h)[1]
    assert_close(y, ops.swiglu_forward(h), 1e-15, "y")
    gate, up = h[:, :, 0], h[:, :, 1]
    assert_close(y, gate / (1 + np.exp(-gate)) * up, 1e-14, "y")


def test_rows_may_have_positions_of_their_own(ops, rng):
    x, table = rng.standard_normal((3, 4, 2, 6)), rope_table(20, 6, 10.0, ())
    positions = rng.integers(0, 20, (3, 4))
    y = turned(ops, x, positions, table)
    for row in range(3):
        expected = turned(plain(), x[row : row + 1], positions[row], table)
        assert_close(y[row : row + 1], expected, 1e-15, f"row {row}")


def test_frequencies_of_llama_3():
    """Fast rotations stay, slow ones are slower by the factor, the others lie between."""
    plain_ones = rope_frequencies(64, 5e5, ())
    scaled = rope_frequencies(64, 5e5, (8.0, 1.0, 4.0, 8192.0))
    ratio = scaled / plain_ones
    turns = 8192 * plain_ones / (2 * np.pi)
    assert (ratio[turns > 4] == 1).all()
    assert_close(ratio[turns < 1], np.full((turns < 1).sum(), 1 / 8), 1e-15, "slow")
    between = ratio[(turns >= 1) & (turns <= 4)]
    assert len(between)
    assert ((between > 1 / 8) & (between < 1)).all()
