"""A rank that trains as `mpipar train` does: what benchmarks of real steps begin with."""

from __future__ import annotations

from typing import Any

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.data.rows import Rows
from mpipar.data.source import load_source
from mpipar.train.worker import StepResult, Worker


class Trained:
    """A rank's worker with its first weights, and the rows that it trains on.

    tokens: the default text's without any. ops: plain ones of float32 on the CPU without any.
    Comm: makes the worker's groups; every rank must make its own.
    """

    def __init__(self, config: Any, world: Any, recorder: Any, tokens: Any = None, ops: Any = None):
        self.worker = Worker(config, Grid.of(config.grid, world.rank),
                             ops or ops_module.make("cpu", "float32"), recorder, world)
        self.worker.initialize()
        if tokens is None:
            tokens = load_source((), config.model.vocab_size).tokens
        self.rows = Rows(self.worker.ops, tokens, config, self.worker.grid)

    def step(self, number: int) -> StepResult:
        """Train a step. Comm: everything of it."""
        return self.worker.train_step(number, lambda mb: self.rows.train(number, mb))
