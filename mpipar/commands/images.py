"""What a convnet shows at the end: loss and accuracy on held-out images."""

from __future__ import annotations

from mpipar.data.images import Rows
from mpipar.inference.classify import accuracy

UNIT = "img"


def finish(worker, inputs, log, seconds) -> None:
    """Held-out loss and accuracy. Comm: two sweeps of forward passes over the held-out part."""
    config = worker.config
    rows = Rows(worker.ops, inputs.held_out, config, worker.grid)
    loss, count = worker.evaluate(rows)
    share, _ = accuracy(worker, rows)
    trained = config.train.batch_size * config.train.steps
    log(f"\nheld-out loss {loss:.4f} nats per image, accuracy {share:.2%} of {count:,} images"
        f" (trained on {trained:,} images in {seconds:.1f} s)")
