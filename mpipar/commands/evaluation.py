"""What a run learns of its model between steps: the held-out loss, and texts."""

from __future__ import annotations

import json
from time import perf_counter

from mpipar import data
from mpipar.commands.finish import UNITS, show_text


class Evaluation:
    """The held-out losses and the texts of one run; every rank calls it at the same step.

    Both are functions of the weights alone, and change nothing that a step reads. file: the
    `GrowingFile` evaluations.jsonl on world rank 0, None elsewhere. events: `Events` or None.
    """

    def __init__(self, worker, inputs, log, file=None, events=None):
        self.worker, self.inputs, self.log = worker, inputs, log
        self.file, self.events = file, events
        self.run, self.steps = worker.config.run, worker.config.train.steps
        source = data.data_of(worker.config.model)
        self.rows = source.Rows(worker.ops, source.evaluated(inputs.held_out, worker.config),
                                worker.config, worker.grid)
        self.unit = {"tok": "token", "img": "image"}[UNITS[worker.config.model.model]]

    def after_step(self, step: int) -> bool:
        """Evaluate and generate if it is this step's turn; return whether anything was done.

        The last step has none: what ends the run does both.
        Comm: that of `loss` and `show_text`.
        """
        evaluates, samples = (every and step % every == 0 and step < self.steps
                              for every in (self.run.eval_interval, self.run.sample_interval))
        if evaluates:
            start = perf_counter()
            loss, count = self.loss(step)
            self.log(f"step {step}: held-out loss {loss:.4f} nats per {self.unit} over {count:,}"
                     f" {self.unit}s, {perf_counter() - start:.2f} s")
        if samples:
            show_text(self.worker, self.inputs, self.log, f"step {step}: text")
        return bool(evaluates or samples)

    def loss(self, step: int) -> tuple[float, int]:
        """(mean held-out loss, number of tokens or images), which evaluations.jsonl gets too.

        Comm: that of `Worker.evaluate`.
        """
        start = perf_counter()
        loss, count = self.worker.evaluate(self.rows)
        line = {"step": step, "held_out_loss": loss, f"{self.unit}s": count,
                "seconds": perf_counter() - start}
        if self.file is not None:
            self.file.write(json.dumps(line) + "\n")
        if self.events is not None:
            self.events.add(line)
        return loss, count
