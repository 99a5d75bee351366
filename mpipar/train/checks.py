"""Checks of a run between its steps: the loss of held-out rows, and weights before a save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from mpipar.layers.stash import Batch
from mpipar.train import non_finite
from mpipar.train.gradsync import all_reduce_scalars, masked_contribution
from mpipar.train.worker import Worker


class HeldOut(Protocol):
    """Held-out rows, in batches: microbatches, and how many of them count."""

    def rows_of_sweep(self) -> int: ...
    def sweep(self) -> Iterator[tuple[list[Batch], int]]: ...


def evaluate(worker: Worker, rows: HeldOut) -> tuple[float, int]:
    """Return (mean loss in nats per token, number of tokens) of one sweep of held-out rows.

    The weights are those that all ranks share. It changes nothing that a step reads. The sum is the
    same on every layout, except for the order of its terms.

    Raises NonFiniteError on every rank if the loss is not finite: after the last update no later
    step would find it.
    Comm: one sweep of forward passes and one all_reduce over world.
    """
    total, count = 0.0, rows.rows_of_sweep() * worker.config.model.seq_len
    worker.outer.exchange()
    for batches, counted in rows.sweep():
        losses = worker.forward(range(len(batches)), batches.__getitem__)
        if worker.comms["tp"].index == 0:
            total += sum(
                worker.ops.to_floats([loss for mb, loss in losses.items() if mb < counted])
            )
    worker.outer.exchange()
    with worker.recorder.at("eval"):
        (total,) = all_reduce_scalars(worker.ops, worker.comms, [total], "eval.loss")
    if not math.isfinite(total):
        raise worker.not_finite(f"held-out loss {total / count}: the weights are useless")
    return total / count, count


def check_weights(worker: Worker, step: int) -> None:
    """Check the weights before they are saved after `step`.

    The next step's loss would show the problem too late: the latest checkpoint would be useless.

    Raises NonFiniteError on every rank if a weight is not finite on any.
    Comm: one all_reduce of a number over world.
    """
    ops = worker.ops
    with worker.recorder.at("check"):
        own = sum(ops.to_floats([ops.square_sum(flat.master) for flat in worker.flats]))
        bad = [masked_contribution(own, counts=False)]
        (total,) = all_reduce_scalars(ops, worker.comms, bad, "check.weights")
    if not math.isfinite(total):
        report = non_finite.report(
            worker.comms, worker.stages, "weights", lambda flat: flat.pieces("master"), {}
        )
        raise worker.not_finite(
            f"step {step}: the update produced weights that are not finite: not saved", report
        )
