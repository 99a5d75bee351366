"""A product whose weights are several tensors reads each one from its file, whatever the form."""

import numpy as np
import pytest
from helpers import assert_close
from ops_cases import numeric_gradient

import mpipar
from mpipar.layers.ffn import GatedFeedForward


def gated(rows):
    """A gated network of 5 and 3 features with its parameters by name, and x and dy."""
    ops, rng = mpipar.make_ops("cpu", "float64"), np.random.default_rng(2)
    context = mpipar.Context(ops, mpipar.Comms.solo(ops))
    wide = {f"ffn.{name}": ((3,), "tp") for name in GatedFeedForward.tensors}
    up = mpipar.ColumnLinear(context, "ffn.up", (5,), wide, std=0.5, rows=rows)
    down = mpipar.RowLinear(context, "ffn.down", (3,), (5,), std=0.5, rows=rows)
    layer = GatedFeedForward("ffn", up, down)
    mpipar.FlatParams(ops, layer.params).initialize(seed=1, spread=0.5)
    params = {param.name: param for param in layer.params}
    return layer, params, *rng.standard_normal((2, 1, 4, 5))


@pytest.mark.parametrize("rows", ["in", "out"])
def test_gate_and_up_multiply_their_own_columns(rows):
    layer, params, x, dy = gated(rows)

    def y():
        w = {name: param.data for name, param in params.items()}
        gate, up = (x @ w[f"ffn.{name}.w"].T + w[f"ffn.{name}.b"] for name in ("gate", "up"))
        down = w["ffn.down.w"] if rows == "in" else w["ffn.down.w"].T
        return (gate / (1 + np.exp(-gate)) * up) @ down + w["ffn.down.b"]

    stash = mpipar.Stash()
    assert_close(layer.forward(x, stash), y(), 1e-12, "y")
    dx = layer.backward_input(dy, stash)
    layer.backward_weight(stash)
    assert not stash
    for name, array, gradient in [
        ("x", x, dx),
        *((name, param.data, param.grad) for name, param in params.items()),
    ]:
        numeric = numeric_gradient(lambda: float((y() * dy).sum()), array)
        assert_close(gradient, numeric, 1e-6, name)


def test_a_tensor_lies_behind_the_one_before_it():
    layer, params, *_ = gated("out")
    whole = layer.up.dw
    whole[...] = np.arange(whole.size).reshape(whole.shape)
    assert_close(params["ffn.gate.w"].grad, whole[:, :3].T, 0, "gate")
    assert_close(params["ffn.up.w"].grad, whole[:, 3:].T, 0, "up")
