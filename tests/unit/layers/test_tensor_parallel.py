"""Cut axes: flags, arithmetic, and products whose weights are several tensors."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import numeric_gradient

import mpipar as library
from bench.matmul import NAME, PHASES, CutProduct, Sizes, whole
from mpipar import ops as ops_module
from mpipar.comm.grid import Grid, chunk_size, chunk_slice
from mpipar.comm.group import Comm
from mpipar.comm.groups import Comms
from mpipar.comm.record import Record, wire_bytes
from mpipar.comm.recorder import Recorder
from mpipar.comm.transport import ShapesTransport
from mpipar.errors import UsageError
from mpipar.layers.ffn import GatedFeedForward
from mpipar.layers.linears import LINEARS
from mpipar.ops.timed_ops import TimedOps
from mpipar.study.trace import pop, waits


@given(st.integers(0, 50), st.integers(1, 12))
def test_pieces_follow_each_other_and_cover_the_axis(length, parts):
    places = [chunk_slice(length, parts, index) for index in range(parts)]
    assert [i for place in places for i in range(place.start, place.stop)] == list(range(length))
    assert all(place.stop - place.start <= chunk_size(length, parts) for place in places)
    assert not length or (
        (chunk_size(length, parts) - 1) * parts < length <= chunk_size(length, parts) * parts
    )


@pytest.mark.parametrize("cut", LINEARS)
def test_every_operation_of_a_cut_is_its_layer_s(cut):
    """--trace records them, helpers of a cut included. The last of two ranks is padded."""
    recorder, sizes = Recorder(), Sizes(1, 3, 5, 7)
    ops = TimedOps(ops_module.make("cpu", "float64"), recorder)
    comm = Comm("tp", (0, 1), 1, ShapesTransport(ops), recorder)
    comms = Comms.solo(ops)
    comms["tp"] = comm
    comms.grid = Grid(1, {"tp": 2})
    product = CutProduct(ops, recorder, cut, comms, None, sizes)
    product.take(whole(sizes, "float64"))
    ops.active = True
    for phase in PHASES:
        product.run(phase)
    assert {layer for layer, *_ in recorder.operations} == {NAME}
    functions = {function for _, function, *_ in recorder.operations}
    assert "matmul_nt" in functions
    assert functions & {"matmul", "matmul_bias"}
    assert functions & {"matmul_tn_add", "matmul_tn_add_sums"}


@pytest.mark.parametrize("operation", ["broadcast", "reduce"])
def test_a_chain_is_booked_with_its_mean(operation):
    """All but one of the ranks send the payload."""
    assert [wire_bytes(operation, 120, q) * q for q in (1, 2, 3, 4)] == [0, 120, 240, 360]


def reduce_trace(posted):
    """A trace of one reduce to the first of three ranks; all are done at 100 ns."""
    ranks = []
    for world_rank, time in enumerate(posted):
        record = Record(
            **dict.fromkeys(Record._fields, 0)
            | {
                "posted_ns": time,
                "waited_ns": time,
                "done_ns": 100,
                "operation": "reduce",
                "name": "product",
                "axis": "tp",
                "peer": 0,
            }
        )
        ranks.append(
            SimpleNamespace(
                world_rank=world_rank, groups={"tp": (0, 1, 2)}, records=[record], start=0, end=120
            )
        )
    return SimpleNamespace(ranks=ranks)


def test_only_the_root_of_a_reduce_waits():
    """Rank 2 comes last, at 60 ns: rank 1 need not wait for it, rank 0 needs them all."""
    trace = reduce_trace([10, 20, 60])
    found = waits.find(trace)
    assert [own[0].wait_ns for own in found.calls] == [50, 0, 0]
    assert [own[0].late for own in found.calls] == [2, -1, -1]
    # Without transfer the root is done when the last one has come, and the others at once.
    assert pop.replay(trace, found) == [60 + 20, 20 + 20, 60 + 20]


# --- A product whose weights are several tensors reads each one from its file, whatever the form


def gated(rows):
    """A gated network of 5 and 3 features with its parameters by name, and x and dy."""
    ops, rng = library.make_ops("cpu", "float64"), np.random.default_rng(2)
    context = library.Context(ops, library.Comms.solo(ops))
    wide = {f"ffn.{name}": ((3,), "tp") for name in GatedFeedForward.tensors}
    up = library.ColumnLinear(context, "ffn.up", (5,), wide, std=0.5, rows=rows)
    down = library.RowLinear(context, "ffn.down", (3,), (5,), std=0.5, rows=rows)
    layer = GatedFeedForward("ffn", up, down)
    library.FlatParams(ops, layer.params).initialize(seed=1, spread=0.5)
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

    stash = library.Stash()
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


def test_weights_that_zero_has_taken_away_are_named():
    layer, params, x, _ = gated("in")
    params["ffn.down.w"].unbind("data")
    with pytest.raises(UsageError, match=r"ffn\.down\.w: has no data yet"):
        layer.forward(x, library.Stash())
