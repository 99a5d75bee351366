"""Checks of a run: no number may be NaN or infinite, in a step, on held-out rows or in a save.

Every rank finds out, because the sums that are checked are the same on all of them. Together they
then look for what is not finite, and on which ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Protocol

import numpy as np

from mpipar.comm.objects import broadcast_text, gather_objects
from mpipar.errors import NonFiniteError
from mpipar.layers.flat import FlatParams
from mpipar.layers.stash import Batch
from mpipar.ops.signature import Array
from mpipar.train.gradsync import all_reduce_scalars, masked_contribution
from mpipar.train.worker import GetBatch, StepResult, StepVotes, Worker

SHOWN = 3  # lines of a report, and ranks of a line


class HeldOut(Protocol):
    """Held-out rows, in batches: microbatches, and how many of them count."""

    def rows_of_sweep(self) -> int: ...
    def sweep(self) -> Iterator[tuple[list[Batch], int]]: ...


def train_step(
    worker: Worker, step: int, get_batch: GetBatch, votes: Callable[[], StepVotes] = StepVotes
) -> StepResult:
    """Run `Worker.train_step`; if it finds no finite loss or gradient, name tensors and ranks.

    Comm: that of the step, and of `report` after a failure.
    """
    try:
        return worker.train_step(step, get_batch, votes)
    except NonFiniteError as error:
        pieces_of = attrgetter("reduced_grads")
        where = report(worker, "gradient", pieces_of, worker.losses)
        raise not_finite(worker, str(error), where) from None


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
        if worker.comms["tp"].group_rank == 0:
            total += sum(
                worker.ops.to_floats([loss for mb, loss in losses.items() if mb < counted])
            )
    worker.outer.exchange()
    with worker.recorder.at("eval"):
        (total,) = all_reduce_scalars(worker.ops, worker.comms, [total], "eval.loss")
    if not math.isfinite(total):
        raise not_finite(worker, f"held-out loss {total / count}: the weights are useless")
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
        what = f"step {step}: the update produced weights that are not finite: not saved"
        where = report(worker, "weights", lambda flat: flat.pieces("master"), {})
        raise not_finite(worker, what, where)


def not_finite(worker: Worker, what: str, where: Iterable[str] = ()) -> NonFiniteError:
    """Return the error of a run whose numbers are not finite. where: more lines."""
    other = ", or --dtype bfloat16: float16 ends at 65504" * worker.loss_scale.dynamic
    advice = f"try a smaller --lr (now {worker.config.train.lr:g}) or a longer --warmup-steps"
    return NonFiniteError([f"{what}; {advice}{other}", *where])


def report(
    worker: Worker,
    title: str,
    pieces_of: Callable[[FlatParams], list[Array]],
    losses: Mapping[int, float],
) -> list[str]:
    """Return lines that name losses, and tensors from the end of the model on, with their ranks.

    title: what the numbers are that pieces_of(flat) picks. losses: by microbatch.
    Comm: a gather of facts and a broadcast of text over inner, without records.
    """
    comms = worker.comms
    own = [
        (-math.inf, 0, f"the loss of microbatch {mb} is {loss}")
        for mb, loss in losses.items()
        if not math.isfinite(loss)
    ][:1]
    for number, stage in worker.stages.items():
        for flat in stage.flats:
            own += [
                (-number, -param.unit, f"{title} of {param.name} is not finite")
                for param in flat.params
                for parts in [flat.parts(param, pieces_of(flat))]
                if not all(np.isfinite(worker.ops.to_host(part)).all() for _, part in parts)
            ]
    facts = gather_objects(comms.mpi_inner, [worker.grid.describe(), own]) or ()
    ranks: dict[str, list[str]] = {}
    for _, _, what, world_rank, place in sorted(
        (*one, world_rank, place)
        for world_rank, (place, found) in zip(comms["inner"].ranks, facts, strict=False)
        for one in found
    ):
        ranks.setdefault(what, []).append(f"rank {world_rank} ({place})")
    lines = [f"{what} on {', '.join(some[:SHOWN])}" for what, some in ranks.items()]
    return broadcast_text(comms.mpi_inner, "\n".join(lines[:SHOWN])).splitlines()
