"""Steps on shapes: what a rank of any layout sends, holds and computes, without numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpipar import cli, data
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.commands.explain import of_named_axes
from mpipar.commands.resolve import resolve
from mpipar.train.worker import Worker

context_of = partial(cli.context_of, None, "explain")


def config_of(words: list[str]) -> Any:
    """The resolved config of the flags of `mpipar explain`. Raises UsageError."""
    return resolve(*of_named_axes(context_of(words).reading))[0]


def take_step(config: Any, rank: int, recorder: Recorder, ops: Any) -> Worker:
    """The real worker of a rank, behind one step with these ops."""
    worker = Worker(config, Grid.of(config.grid, rank), ops, recorder)
    batch = data.data_of(config.model).blank_batch
    worker.train_step(1, lambda mb: batch(ops, config))
    return worker
