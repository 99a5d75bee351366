"""SwiGLU and rotary positions: finite differences, far values, and what a rotation must keep."""

import numpy as np
import pytest
from helpers import assert_close
from ops_cases import plain
from test_ops import COMPILED, DIFFERENCES, implementation_of, numeric_gradient

from mpipar.ops import numpy_ops
from mpipar.ops.array_ops import rope_frequencies, rope_table


@pytest.fixture(params=["plain", "tuned", "tuned in tiny tiles", COMPILED])
def ops(request, monkeypatch):
    """An implementation in float64; tiny tiles make small arrays cross every tile border."""
    if request.param == "tuned in tiny tiles":
        monkeypatch.setattr(numpy_ops, "TILE", 16)
    return implementation_of(request.param)


def test_swiglu_gradient(ops, rng):
    h, dy = 2 * rng.standard_normal((3, 5, 2, 7)), rng.standard_normal((3, 5, 7))
    numeric = numeric_gradient(lambda: float((ops.swiglu_forward(h) * dy).sum()), h)
    dh, y = ops.swiglu_backward_input(dy, h)
    assert_close(dh, numeric, DIFFERENCES, "dh")
    assert_close(y, ops.swiglu_forward(h), 1e-15, "y")
    gate, up = h[:, :, 0], h[:, :, 1]
    assert_close(y, gate / (1 + np.exp(-gate)) * up, 1e-14, "y")


def test_swiglu_is_finite_and_right_far_out(ops):
    gate = np.array([-1e4, -50.0, 0.0, 50.0, 1e4])
    h = np.stack([gate, np.full(5, 2.0)])[None]
    assert_close(ops.swiglu_forward(h)[0], 2.0 * np.maximum(gate, 0.0), 1e-15, "y")
    (dh,), _ = ops.swiglu_backward_input(np.ones((1, 5)), h)
    assert_close(dh[0], 2.0 * np.array([0.0, 0.0, 0.5, 1.0, 1.0]), 1e-15, "dgate")
    assert_close(dh[1], np.maximum(gate, 0.0), 1e-15, "dup")


def turned(ops, x, positions, table, function="rope_forward"):
    """A turned copy of x."""
    x = x.copy()
    assert getattr(ops, function)(x, positions, table) is x
    return x


def test_rope_gradient(ops, rng):
    x, dy = rng.standard_normal((2, 5, 3, 6)), rng.standard_normal((2, 5, 3, 6))
    positions, table = np.array([7, 0, 3, 4, 1]), rope_table(8, 6, 10.0, ())
    numeric = numeric_gradient(
        lambda: float((turned(ops, x, positions, table) * dy).sum()), x)
    dx = turned(ops, dy, positions, table, "rope_backward_input")
    assert_close(dx, numeric, DIFFERENCES, "dx")
    there = turned(ops, x, positions, table)
    assert_close(turned(ops, there, positions, table, "rope_backward_input"), x, 1e-15, "back")


def test_rope_turns_number_i_with_number_i_of_the_second_half(ops):
    x, table = np.zeros((1, 2, 1, 6)), rope_table(3, 6, 100.0, ())
    x[0, :, 0, 1] = 1.0
    y = turned(ops, x, np.array([0, 2]), table)
    angle = 2 * 100.0 ** (-2 / 6)
    assert_close(y[0, 0, 0], x[0, 0, 0], 1e-15, "position 0")
    assert_close(y[0, 1, 0], np.array([0, np.cos(angle), 0, 0, np.sin(angle), 0]), 1e-15, "y")


def test_scores_depend_on_distances_only(ops, rng):
    q, k = rng.standard_normal((2, 1, 4, 1, 8))
    table, places = rope_table(100, 8, 50.0, ()), np.array([0, 3, 4, 9])
    scores = [np.einsum("bihd,bjhd->ij", *(turned(ops, x, places + shift, table) for x in (q, k)))
              for shift in (0, 61)]
    assert_close(*scores, 1e-13, "scores")


def test_rows_may_have_positions_of_their_own(ops, rng):
    x, table = rng.standard_normal((3, 4, 2, 6)), rope_table(20, 6, 10.0, ())
    positions = rng.integers(0, 20, (3, 4))
    y = turned(ops, x, positions, table)
    for row in range(3):
        expected = turned(plain(), x[row:row + 1], positions[row], table)
        assert_close(y[row:row + 1], expected, 1e-15, f"row {row}")


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
