"""Exercise 3c: an all-reduce from sends and receives. Fill the blank, then

    mpiexec -n 4 python -m pytest docs/examples/exercises/ring_all_reduce.py

`comm.isend(x, peer, tag, name)` and `comm.irecv(x, peer, tag, name)` return requests, which have a
`.wait()`; `comm.neighbor(steps)` is the rank that many places to the right in the ring.
"""

import numpy as np
from mpi4py import MPI

import mpipar
from mpipar.comm.group import Comm


def all_reduce(comm: Comm, x: np.ndarray) -> None:
    """Leave the sum of all ranks' x in x; x.size is a multiple of comm.size."""
    ...  # your code


def test_sum_and_bytes() -> None:
    world, recorder, ops = MPI.COMM_WORLD, mpipar.Recorder(), mpipar.make_ops("cpu", "float64")
    comm = mpipar.Comms(mpipar.Grid(world.rank, {"tp": world.size}), ops, recorder, world)["tp"]
    x = np.arange(12.0 * world.size) * 10.0**world.rank
    expected = sum(np.arange(12.0 * world.size) * 10.0**rank for rank in range(world.size))
    all_reduce(comm, x)
    sent = sum(one.wire_bytes for one in recorder.records)
    np.testing.assert_array_equal(x, expected)
    assert {one.operation for one in recorder.records} <= {"send", "recv"}
    assert sent <= 2 * (world.size - 1) * x.nbytes // world.size, "more bytes than a ring sends"
