"""Real training steps of bench.claims, with a trace, and how ranks spend their time in them."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.record import COMPUTE, Recorder
from mpipar.data.rows import Rows
from mpipar.trace import segments
from mpipar.trace.tracer import Tracer
from mpipar.train.worker import Worker

STEPS = 6  # of each run; the first is not counted


def median_step(config, tokens, world, folder: str) -> float:
    """Train STEPS steps with a trace in `folder`; median seconds of this rank's traced ones.

    Comm: everything of those steps and of their trace.
    """
    ops, recorder = ops_module.make("cpu", "float32"), Recorder(1 << 16)
    worker = Worker(config, Grid.of(config.grid, world.rank), ops, recorder, world)
    worker.initialize()
    data, tracer = Rows(ops, tokens, config, worker.grid), Tracer(worker, world, Path(folder))
    seconds = []
    for step in range(1, STEPS + 1):
        with tracer.step(step):
            result = worker.train_step(step, lambda mb, step=step: data.train(step, mb))
        seconds.append(result.step_seconds)
    worker.close()
    return statistics.median(seconds[1:])


def time_shares(analysis) -> dict[str, float]:
    """useful, waiting, transfer and idle of an analysed trace; they add to 1."""
    sums = sum(map(segments.by_kind, analysis.segments), Counter())
    shares = {"useful": sum(sums[kind] for kind in COMPUTE), "waiting": sums["wait"],
              "transfer": sums["transfer"], "idle": sums["other"]}
    return {name: length / sums.total() for name, length in shares.items()}
