"""Two layers, y = gelu(x w_up + b_up) w_down + b_down, cut over all ranks.

    mpiexec -n 2 python docs/examples/cut_mlp.py

The same function also runs on a group of one rank, which sends nothing, and must give the same
result.
"""

import numpy as np
from mpi4py import MPI

import mpipar

WORLD = MPI.COMM_WORLD
OPS = mpipar.make_ops("cpu", "float64")


def mlp(comms, x, dy):
    """Return y (B, T, 6) and dx (B, T, 6); each rank holds its share of the 23 channels between."""
    context = mpipar.Context(OPS, comms)
    up = mpipar.ColumnLinear(context, "mlp.up", (6,), (23,), std=0.3)
    down = mpipar.RowLinear(context, "mlp.down", (23,), (6,), std=0.3)
    layer = mpipar.FeedForward("mlp", up, down)
    mpipar.FlatParams(OPS, layer.params).initialize(seed=1, spread=0.1)
    stash = mpipar.Stash()
    y = layer.forward(x, stash)
    dx = layer.backward_input(dy, stash)
    layer.backward_weight(stash)
    return y, dx


recorder = mpipar.Recorder()
comms = mpipar.Comms(mpipar.Grid(WORLD.rank, {"tp": WORLD.size}), OPS, recorder, WORLD)
x, dy = np.random.default_rng(0).standard_normal((2, 4, 5, 6))
cut, whole = mlp(comms, x, dy), mlp(mpipar.Comms.solo(OPS), x, dy)
difference = max(np.abs(a - b).max() for a, b in zip(cut, whole, strict=True))
if WORLD.rank == 0:
    print(f"largest difference from one rank: {difference:.1e}")
    for axis, name, operation, *_ in recorder.counters:
        print(f"{operation} of {name} over {axis}")
