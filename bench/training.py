"""One rank's training steps: real ones as `mpipar train` takes them, and steps on shapes.

A step on shapes shows what a rank of any layout sends, holds and computes, without numbers.
"""

from __future__ import annotations

from typing import Any

from mpipar import cli
from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.recorder import Recorder
from mpipar.commands.explain import of_named_axes
from mpipar.run.data import rows
from mpipar.run.data.rows import Rows
from mpipar.run.data.source import load_source
from mpipar.run.resolve import resolve
from mpipar.train.worker import StepResult, Worker


def worker_of(config: Any, world: Any, ops: Any, recorder: Recorder | None = None) -> Worker:
    """Return a rank's worker with its initial weights. Comm: makes its groups, on every rank."""
    worker = Worker(
        config,
        Grid.of(config.grid, world.rank),
        ops,
        recorder or Recorder(),
        world if world.size > 1 else None,
    )
    worker.initialize()
    return worker


class Trained:
    """A rank's worker with its initial weights, and the rows that it trains on.

    tokens: by default those of the default text. ops: by default plain float32 ones on the CPU.
    Comm: makes the worker's groups; every rank must make its own.
    """

    def __init__(self, config: Any, world: Any, recorder: Any, tokens: Any = None, ops: Any = None):
        self.worker = worker_of(config, world, ops or ops_module.make("cpu", "float32"), recorder)
        if tokens is None:
            tokens = load_source((), config.model.vocab_size).tokens
        self.rows = Rows(self.worker.ops, tokens, config, self.worker.grid)

    def step(self, number: int) -> StepResult:
        """Train a step. Comm: all of the step's."""
        return self.worker.train_step(number, lambda mb: self.rows.train(number, mb))


def config_of(words: list[str]) -> Any:
    """Return the resolved config of the flags of `mpipar explain`. Raises UsageError."""
    return resolve(*of_named_axes(cli.context_of(None, "explain", words).parsed))[0]


def take_step(config: Any, rank: int, recorder: Recorder, ops: Any) -> Worker:
    """Return the real worker of a rank after one step with these ops."""
    worker = Worker(config, Grid.of(config.grid, rank), ops, recorder)
    batch = rows.blank_batch
    worker.train_step(1, lambda mb: batch(ops, config))
    return worker
