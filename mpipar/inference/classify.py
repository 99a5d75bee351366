"""Accuracy of an image classifier, computed through the same pipeline that trains it."""

from __future__ import annotations

from dataclasses import replace

from mpipar.inference.sampling import best
from mpipar.train.gradsync import all_reduce_scalars


def accuracy(worker, rows) -> tuple[float, int]:
    """Return the accuracy over one sweep of held-out images, and the number of images.

    Comm: one sweep of forward passes, one all_gather over tp per microbatch, and one all_reduce
    over world.
    """
    right, count = 0.0, rows.rows_of_sweep()
    for number in range(rows.num_sweeps()):
        batches, counted = rows.filled_sweep(number)
        outputs = worker.forward(
            range(len(batches)), lambda mb, batches=batches: replace(batches[mb], targets=None)
        )
        for mb, logits in sorted(outputs.items()):
            ids = best(worker, logits, 1)[:, 0, 1]
            found = worker.ops.to_host(batches[mb].targets) == ids
            if worker.comms["tp"].index == 0 and mb < counted:
                right += float(found.sum())
    (right,) = all_reduce_scalars(worker.ops, worker.comms, [right], "eval.accuracy")
    return right / count, count
