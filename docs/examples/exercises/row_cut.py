"""Exercise 6b: a matrix product cut by the channels that it sums over. Fill the blanks, then

    mpiexec -n 2 python -m pytest docs/examples/exercises/row_cut.py

Each of q ranks has x (T, K/q), its columns of the input, and w (K/q, N), its rows of the weight.
`comm.all_reduce(x, name)` returns the sum of all ranks' x.
"""

import numpy as np
from mpi4py import MPI

import mpipar
from mpipar.comm.group import Comm


def forward(comm: Comm, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the whole y (T, N) on every rank."""
    ...  # your code


def backward_input(comm: Comm, dy: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return this rank's dx (T, K/q) of the whole dy (T, N)."""
    ...  # your code


def backward_weight(comm: Comm, x: np.ndarray, dy: np.ndarray, dw: np.ndarray) -> None:
    """Add the gradient of this rank's rows to dw (K/q, N)."""
    ...  # your code


def test_equals_one_rank() -> None:
    world, recorder, ops = MPI.COMM_WORLD, mpipar.Recorder(), mpipar.make_ops("cpu", "float64")
    comm = mpipar.Comms(mpipar.Grid(world.rank, {"tp": world.size}), ops, recorder, world)["tp"]
    random = np.random.default_rng(6)
    x, w, dy = (random.standard_normal(shape) for shape in ((3, 8), (8, 5), (3, 5)))
    own = slice(world.rank * 8 // world.size, (world.rank + 1) * 8 // world.size)
    mine, rows = np.ascontiguousarray(x[:, own]), np.ascontiguousarray(w[own])
    dw = np.ones_like(rows)
    y, dx = forward(comm, mine, rows), backward_input(comm, dy, rows)
    backward_weight(comm, mine, dy, dw)
    np.testing.assert_allclose(y, x @ w, rtol=0, atol=1e-12)
    np.testing.assert_allclose(dx, (dy @ w.T)[:, own], rtol=0, atol=1e-12)
    np.testing.assert_allclose(dw, 1 + (x.T @ dy)[own], rtol=0, atol=1e-12)
    assert [one.operation for one in recorder.records] == ["all_reduce"], "one barrier, forward"
