"""The share of images that a model of classes gets right, through the same pipeline that trains."""

from __future__ import annotations

from dataclasses import replace

from mpipar.generate import best_ids
from mpipar.gradsync import agree


def accuracy(worker, rows) -> tuple[float, int]:
    """Share of right classes over one sweep of held-out images, and the number of images.

    Comm: one sweep of forward passes, one all_gather over tp per microbatch, and one all_reduce
    over world.
    """
    right, sweeps = 0.0, rows.num_sweeps()
    for number in range(sweeps):
        batches = {}

        def batch_of(mb, batches=batches, number=number):
            batches[mb] = rows.sweep(number, mb)
            return replace(batches[mb], targets=None)

        outputs = worker.forward(worker.schedule.num_microbatches, batch_of)
        for mb, logits in sorted(outputs.items()):
            ids = best_ids(worker, logits, None)
            found = worker.ops.to_host(batches[mb].targets) == ids
            right += float(found.sum()) if worker.comms.tp.index == 0 else 0.0
    right, = agree(worker.ops, worker.comms, [right], "eval.accuracy")
    count = sweeps * worker.config.train.batch_size
    return right / count, count
