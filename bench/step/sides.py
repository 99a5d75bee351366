"""The model of bench.step, its rows, and the side that is ours: a training step on this rank.

A side has `take(step)`, which makes a whole step and returns its loss and `TIMES`; steps count from
1. PyTorch's sides are in torch_process.py.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from bench.program import add_counts, count
from bench.training import worker_of
from mpipar.comm.recorder import Recorder
from mpipar.config.model import ARCHS
from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.layers.stash import Batch
from mpipar.study.explain.predict import predict
from mpipar.train.optim import learning_rate

TIMES = ("forward_backward", "update", "communication")  # seconds; the last one is inside the first


def add_sizes(parser) -> None:
    """Add the flags of the model's sizes and of the number of steps."""
    parser.add_argument("--arch", choices=tuple(ARCHS), default="gpt2", help="(gpt2)")
    parser.add_argument("--kv-heads", type=count, help="heads of keys (as many as queries)")
    add_counts(
        parser,
        {
            "--layers": (6, "transformer blocks"),
            "--d-model": (384, "model width"),
            "--heads": (6, "attention heads"),
            "--seq-len": (256, "tokens per row"),
            "--batch-size": (4, "rows per step"),
            "--vocab-size": (256, "tokens in the vocabulary"),
            "--repeats": (20, "timed steps"),
        },
    )


def configure(args, layout: dict, num_ranks: int):
    """Return the resolved configuration of the model in a layout: settings by their names.

    args: the flags of `add_sizes`, device and dtype.
    """
    names = ("arch", "layers", "d_model", "heads", "kv_heads", "seq_len", "vocab_size")
    names += ("batch_size", "device", "dtype")
    values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "experts" in ARCHS[args.arch]:
        values["router_balance"] = "none"  # PyTorch's side has no loss but that of the tokens
    values |= {"dp": 1, "pp": 1, "tp": 1, "num_microbatches": 1, "warmup_steps": 0}
    return resolve(build(values | layout), num_ranks)[0]


def rows_of(args) -> Batch:
    """Return the rows of every step: random ones, the same on all ranks."""
    shape = (args.batch_size, args.seq_len + 1)
    tokens = np.random.default_rng(0).integers(0, args.vocab_size, shape)
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(args.seq_len))


def part_of(batch: Batch, number: int, count: int) -> Batch:
    """Return one of `count` equal parts of the rows."""
    size = len(batch.tokens) // count
    own = slice(number * size, (number + 1) * size)
    return Batch(batch.tokens[own], batch.targets[own], batch.positions)


class OurSide:
    """mpipar's own step, as `mpipar train` runs it, on the given rows.

    Comm: all ranks must build it together, and call each method together.
    """

    def __init__(self, config, rows: Batch, ops, world):
        self.config, self.ops, self.recorder = config, ops, Recorder()
        self.worker = worker_of(config, world, ops, self.recorder)
        count, dp_rank = config.grid.num_microbatches, self.worker.grid.group_rank("dp")
        self.batches = [
            Batch(*(ops.asarray(x) for x in (one.tokens, one.targets, one.positions)))
            for one in (
                part_of(rows, dp_rank * count + mb, config.grid.dp * count) for mb in range(count)
            )
        ]

    def forward_backward(self, step):
        """Return the mean loss of all rows; keep the gradient norm for `update`."""
        loss, self.norm, _ = self.worker.gradients(step, self.batches.__getitem__)
        return loss

    def update(self, step):
        """Clip and apply the gradients."""
        self.worker.gradsync.clip(self.norm, self.config.train.clip)
        self.worker.optimizer.step(learning_rate(self.config.train, step), step)

    def take(self, step) -> tuple[float, ...]:
        """Make a step; return its loss and TIMES."""
        before = self.inside()
        found = timed(self, step, self.ops.synchronize)
        return (*found, (self.inside() - before) * 1e-9)

    def inside(self) -> int:
        """Return the ns inside of communication so far."""
        return sum(counter.nanoseconds for counter in self.recorder.counters.values())


def timed(side, step: int, synchronize) -> tuple[float, float, float]:
    """Return (loss, seconds of both passes, seconds of the update) of a step of a side."""
    start = time.perf_counter()
    loss = side.forward_backward(step)
    synchronize()
    middle = time.perf_counter()
    side.update(step)
    synchronize()
    return loss, middle - start, time.perf_counter() - middle


def step_flops(args) -> int:
    """Return the FLOPs of all products of one step (2 M K N each), counted on shapes.

    With P elements in the matrices of blocks and head, that is 6 B T P + 12 L B T^2 D. The first
    term has 2 operations forward and 4 backward per element and token. The second has attention's
    two products; the hidden half counts. The shapes are those of a CPU, where a table has no rows
    of padding.
    """
    config = configure(args, {}, 1)
    return sum(predict(replace(config, run=replace(config.run, device="cpu")), 0).flops.values())
