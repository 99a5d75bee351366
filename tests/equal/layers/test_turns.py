"""The words for what a barrier makes of an array, compared with numbers on real ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
from small_model import WORLD, comms_of, cpu

from mpipar.comm.group import Comm
from mpipar.comm.record import STATE_CHANGES
from mpipar.layers.context import Context
from mpipar.layers.flat import FlatParams
from mpipar.layers.linears import LINEARS
from mpipar.layers.stash import Stash

pytestmark = pytest.mark.ranks(2, 4)
Q = WORLD.size
# The states of x and y of each cut, and the axis along which one is cut.
STATES = {
    "column": (("whole", 0), ("cut", -1)),
    "row": (("cut", -1), ("whole", 0)),
    "gather": (("whole", 0), ("whole", 0)),
    "reduce": (("whole", 0), ("whole", 0)),
    "column_sp": (("cut", 1), ("cut", -1)),
    "row_sp": (("cut", -1), ("cut", 1)),
    "column_ring": (("cut", 1), ("cut", -1)),
    "row_ring": (("cut", -1), ("cut", 1)),
}
CALLS = {  # the collective of a Comm, as a function of a rank's array (Q, Q)
    "all_reduce": lambda comm, x: comm.all_reduce(x, "sum"),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x, "scatter")[None],
    "reduce": lambda comm, x: comm.reduce(x, 0, "reduce"),
    "all_gather": lambda comm, x: comm.all_gather(x, "gather").reshape(-1, Q),
    "all_to_all": lambda comm, x: comm.all_to_all(x.reshape(Q, Q, 1), "exchange").reshape(Q, Q),
    "broadcast": lambda comm, x: comm.broadcast(x, 0, "copy"),
}


@pytest.fixture
def comms():
    comms = comms_of(axes={"tp": Q})
    yield comms
    comms.close()


@pytest.fixture
def tp(comms):
    return comms["tp"]


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def value(state, x, axis=0):
    """The array that ranks hold together, of what each of them has."""
    parts = WORLD.allgather(x)
    if state == "partial":
        return sum(parts)
    if state == "one":
        return parts[0]
    if state == "whole":
        assert all(np.array_equal(part, x) for part in parts)
        return x
    return np.concatenate(parts, axis)


def before(operation):
    """This rank's array before a collective."""
    rows = 1 if operation == "all_gather" else Q
    own = 0 if STATE_CHANGES[operation][0] == "whole" else WORLD.rank
    return numbers(rows, Q, seed=own)


@pytest.mark.parametrize("operation", CALLS)
def test_a_collective_changes_the_state_and_not_the_array(operation, tp):
    start, end = STATE_CHANGES[operation]
    x = before(operation)
    expected = value(start, x)
    y = CALLS[operation](tp, x.copy())
    if operation == "all_to_all":  # cut along rows, then along columns
        expected = np.concatenate(
            [part.reshape(Q, Q, 1) for part in WORLD.allgather(x)], 2
        ).transpose(2, 0, 1)
        actual = np.stack([part.reshape(Q, Q) for part in WORLD.allgather(y)], 1)
    else:
        actual = value(end, y if y is not None else x)
    np.testing.assert_allclose(actual, expected, rtol=1e-14)


def own(state, x, axis):
    """This rank's part of a whole array."""
    part = np.array_split(x, Q, axis)[WORLD.rank] if state == "cut" else x
    return np.ascontiguousarray(part)


def inner(state, x, y):
    """The inner product of two arrays that ranks hold in one state."""
    local = float((x * y).sum())
    if state == "whole":
        assert value("whole", x) is x
        return local
    return WORLD.allreduce(local)


def gap(name, comms):
    """|<dy, F x> - <I dy, x>| of a cut: zero if backward is the transpose of forward."""
    ops = cpu()
    layer = LINEARS[name](Context(ops, comms), "cut", (12,), (16,), std=0.0, bias=False)
    FlatParams(ops, layer.params)
    (sx, ax), (sy, ay) = STATES[name]
    x, w, dy = (
        own(state, numbers(*shape, seed=seed), axis)
        for state, axis, shape, seed in (
            (sx, ax, (2, 8, 12), 1),
            ("cut", int(layer.cuts_outputs), (12, 16), 2),
            (sy, ay, (2, 8, 16), 3),
        )
    )
    layer.w[:] = w
    stash = Stash(SimpleNamespace(shape=(2, 8)))
    y = layer.forward(x, stash)
    dx = layer.backward_input(dy, stash)
    return abs(inner(sy, dy, y) - inner(sx, dx, x))


@pytest.mark.parametrize("name", LINEARS)
def test_backward_of_a_cut_is_the_transpose_of_forward(name, comms):
    assert gap(name, comms) < 1e-11


@pytest.mark.parametrize("name", ["column", "row"])
def test_without_its_barrier_it_is_not(name, comms, monkeypatch):
    monkeypatch.setattr(Comm, "all_reduce", lambda self, x, name, op="sum": x)
    try:
        assert gap(name, comms) > 1e-3
    except AssertionError:  # what must be whole differs between ranks
        return
