"""Attention with shared key heads, unequal lengths and any positions; merged parts; broken twins.

Expected results come from `attention_cases.formula`, one head and one query at a time.
"""

import numpy as np
import pytest
from attention_cases import NAMES, Case, lse_of
from helpers import assert_close
from ops_cases import HALF_UNIT, plain

from mpipar.ops import make, numpy_attention

# B, Tq, Tk, H, Hkv, d.
SIZES = [(2, 5, 7, 6, 3, 3), (1, 9, 4, 5, 1, 2), (2, 67, 131, 4, 4, 5), (1, 70, 66, 6, 2, 4)]


@pytest.fixture(
    params=["plain", "tuned", "tiny tiles", pytest.param("numba", marks=pytest.mark.numba)]
)
def ops(request, monkeypatch):
    if request.param == "tiny tiles":
        monkeypatch.setattr(numpy_attention, "QUERY_TILE", 2)
        monkeypatch.setattr(numpy_attention, "PART_SCORES", 40)  # fewer heads than a row has
    if request.param == "plain":
        return plain()
    return make("cpu", "float64", kernels="numba" if request.param == "numba" else "numpy")


def case_of(rng, sizes, kind):
    """A Case; `kind` says how its positions are ordered."""
    queries, keys = sizes[1:3]
    q_pos, k_pos = {
        "shuffled": (rng.permutation(2 * queries), rng.permutation(keys)),
        "new tokens": (np.arange(queries) + keys, np.arange(keys)),
        "gaps": (np.arange(queries) * 3, np.arange(keys) * 2 + 1),  # query 0 sees no key
        "ties": (np.sort(rng.integers(0, 4, queries)), np.sort(rng.integers(0, 4, keys))),
    }[kind]
    return Case(rng, sizes, (q_pos[:queries], k_pos))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", ["shuffled", "new tokens", "gaps", "ties"])
def test_both_forms_are_the_formula(ops, rng, sizes, kind):
    case = case_of(rng, sizes, kind)
    case.check(case.block(ops))
    case.check(case.saved(ops))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("q_pos", [9, 3], ids=["sees all keys", "sees some keys"])
def test_one_new_token_of_each_row(ops, rng, q_pos, kv_heads):
    case = Case(rng, (3, 1, 8, 4, kv_heads, 5), (np.array([q_pos]), np.arange(8)))
    case.check(case.block(ops))


def merge(ops, y, stats, y2, stats2):
    ops.attention_merge(y, stats, y2, stats2)


def block_backward(ops, *arrays, **positions):
    return ops.attention_block_backward(*arrays, **positions)


def by_parts(
    ops,
    case,
    shown=lambda case, part: (*(x[:, part] for x in case.qkv[1:]), case.k_pos[part]),
    merge=merge,
    backward=block_backward,
):
    """(y, lse, dq, dk, dv) over three parts of the keys, as a ring of three ranks has them."""
    q, keys = case.qkv[0], len(case.k_pos)
    parts = [slice(0, keys // 3), slice(keys // 3, keys - 2), slice(keys - 2, keys)]
    results = []
    for part in parts:
        k, v, k_pos = shown(case, part)
        results.append(ops.attention_block_forward(q, k, v, case.q_pos, k_pos))
    y, stats = results[0]
    for more in results[1:]:
        merge(ops, y, stats, *more)
    delta, dq, dkv = ops.attention_delta(case.dy, y), 0, []
    for part in parts:
        k, v, k_pos = shown(case, part)
        own_dq, *own = backward(ops, case.dy, q, k, v, stats, delta, q_pos=case.q_pos, k_pos=k_pos)
        dq = dq + own_dq
        dkv.append(own)
    dk, dv = (np.concatenate(grads, axis=1) for grads in zip(*dkv, strict=True))
    return y, lse_of(stats), dq, dk, dv


PARTED = (2, 9, 11, 6, 3, 5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["shuffled", "gaps"])
def test_merged_parts_are_the_whole(ops, rng, kind):
    """With gaps the first queries see no key of the later parts, and one sees none at all."""
    case = case_of(rng, PARTED, kind)
    case.check(by_parts(ops, case))


def added_without_rescaling(ops, y, stats, y2, stats2):
    both = y + y2
    ops.attention_merge(y, stats, y2, stats2)
    y[...] = both


def shifted_heads(case, part):
    k, v = (np.roll(x[:, part], 1, axis=2) for x in case.qkv[1:])
    return k, v, case.k_pos[part]


def local_positions(case, part):
    return *(x[:, part] for x in case.qkv[1:]), case.k_pos[part] - case.k_pos[part].min()


def first_of_group(ops, dy, q, k, v, stats, delta, **positions):
    """dk and dv of one query head of each group."""
    dq, _, _ = ops.attention_block_backward(dy, q, k, v, stats, delta, **positions)
    group = q.shape[2] // k.shape[2]
    one = [x[:, :, ::group] for x in (dy, q)]
    _, dk, dv = ops.attention_block_backward(
        *one, k, v, stats[:, ::group], delta[:, ::group], **positions
    )
    return dq, dk, dv


@pytest.mark.parametrize(
    "twin",
    [
        {"merge": added_without_rescaling},
        {"shown": shifted_heads},
        {"shown": local_positions},
        {"backward": first_of_group},
    ],
    ids=lambda twin: next(iter(twin.values())).__name__,
)
def test_a_broken_twin_is_seen(rng, twin):
    case = case_of(rng, PARTED, "gaps")
    with pytest.raises(AssertionError), np.errstate(all="ignore"):
        case.check(by_parts(make("cpu", "float64"), case, **twin), tol=1e-3)


def test_heads_that_cannot_be_shared_are_refused(ops, rng):
    q, k = rng.standard_normal((1, 3, 5, 2)), rng.standard_normal((1, 3, 2, 2))
    with pytest.raises((AssertionError, ValueError)):
        ops.attention_forward(q, k, k, np.arange(3), np.arange(3))


@pytest.mark.parametrize("dtype", HALF_UNIT)
def test_parts_of_16_bits_are_rounded_once(rng, dtype):
    check_parts_of_16_bits(make("cpu", dtype), rng, 0)


def check_parts_of_16_bits(ops, rng, exact):
    """Partial results are float32; `exact` is the error of a rounded operand."""
    case = Case(rng, PARTED, (np.arange(9) * 3, np.arange(11) * 2 + 1), ops.dtype)
    expected = case.expected
    for name in ("dy", "q_pos", "k_pos"):
        setattr(case, name, ops.asarray(getattr(case, name)))
    case.qkv = tuple(map(ops.asarray, case.qkv))
    q, (k, v) = case.qkv[0], case.qkv[1:]
    results = [
        ops.attention_block_forward(q, k[:, part], v[:, part], case.q_pos, case.k_pos[part])
        for part in (slice(0, 6), slice(6, 11))
    ]
    (y, stats), more = results
    assert y.dtype == stats.dtype == np.float32
    ops.attention_merge(y, stats, *more)
    rounded = ops.empty(y.shape)
    ops.copy(rounded, y)
    unit = HALF_UNIT[str(ops.dtype)]
    assert_close(ops.to_host(y), expected[0], exact + 1e-5, "y")
    assert_close(ops.to_host(rounded).astype(np.float64), expected[0], exact + unit, "rounded y")
    delta = ops.attention_delta(case.dy, y)
    grads = ops.attention_block_backward(
        case.dy, *case.qkv, stats, delta, q_pos=case.q_pos, k_pos=case.k_pos
    )
    for name, grad, wanted in zip(NAMES[2:], grads, expected[2:], strict=True):
        assert grad.dtype == np.float32
        assert_close(ops.to_host(grad), wanted, 2 * exact + 2e-5, name)
