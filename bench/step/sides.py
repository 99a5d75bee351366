"""The sides that bench.step compares: a training step of ours on this rank, and PyTorch's.

A side has `forward_backward(step)`, which returns the loss and finishes all gradients,
`update(step)` and `synchronize()`; steps count from 1.

Other sides only multiply what one training step multiplies, which shows what a step rests on. The
products are those of one rank's step with NumPy's kernels, in their order, on the step's own
arrays. PyTorch multiplies the same arrays. So the rates of both libraries compare, and the time of
a step over that of its products tells what everything else costs.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import prod
from unittest.mock import patch

import numpy as np

from bench.program import add_counts
from bench.step.torch_decoder import TorchDecoder
from bench.training import worker_of
from mpipar.comm.grid import Grid
from mpipar.comm.hosts import quiet_barrier
from mpipar.comm.record import Recorder
from mpipar.config import flags
from mpipar.config.grid import GridConfig
from mpipar.config.model import ARCHS, model_config
from mpipar.config.resolve import resolve
from mpipar.config.run import RunConfig
from mpipar.config.sections import Config
from mpipar.config.train import TrainConfig
from mpipar.data.rows import Batch, Rows
from mpipar.data.source import load_source
from mpipar.job.one_rank import OneRank
from mpipar.ops import make, numpy_ops
from mpipar.study.explain.predict import predict
from mpipar.train.optim import learning_rate

PARTS = ("forward_backward", "update")
CHECK_STEPS, WARM_UP_STEPS = 3, 2
SETTLE_SECONDS = 0.02  # PyTorch's threads spin for a while after its step


# nanoGPT's recipe for a CPU: its sizes, and its update with a decaying learning rate.
RECIPE = {
    "layers": 4,
    "d_model": 128,
    "heads": 4,
    "seq_len": 64,
    "batch_size": 12,
    "vocab_size": 256,
}
RECIPE_TRAIN = {"steps": 2000, "lr": 1e-3, "min_lr_ratio": 0.1, "warmup_steps": 100, "beta2": 0.99}


def add_sizes(parser) -> None:
    """Add the flags of the model's sizes and of the number of steps."""
    archs = [name for name, values in ARCHS.items() if "experts" not in values]
    parser.add_argument("--arch", choices=archs, default="gpt2", help="(gpt2)")
    parser.add_argument("--kv-heads", type=flags.count, help="heads of keys (as many as queries)")
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
    """Return the resolved configuration of the model in a layout: settings of the grid.

    all_reduce among them belongs to the run's settings.
    """
    model = model_config(
        {
            "arch": args.arch,
            "layers": args.layers,
            "d_model": args.d_model,
            "heads": args.heads,
            "kv_heads": args.kv_heads,
            "seq_len": args.seq_len,
            "vocab_size": args.vocab_size,
        }
    )
    train = TrainConfig(
        batch_size=args.batch_size,
        **(RECIPE_TRAIN if getattr(args, "recipe", None) else {"warmup_steps": 0}),
    )
    axes = {"dp": 1, "pp": 1, "tp": 1, "num_microbatches": 1} | layout
    run = RunConfig(device=args.device, dtype=args.dtype, all_reduce=axes.pop("all_reduce", "mpi"))
    config, _ = resolve(Config(model, GridConfig(**axes), train, run), num_ranks)
    return config


def rows_of(args):
    """Return the function that gives the rows of a step (from 1) on every rank: one Batch of all.

    They are random and the same in every step, or those of the default text for a recipe.
    """
    if not getattr(args, "recipe", None):
        shape = (args.batch_size, args.seq_len + 1)
        tokens = np.random.default_rng(0).integers(0, args.vocab_size, shape)
        batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(args.seq_len))
        return lambda step: batch
    config = configure(args, {}, 1)
    tokens = load_source((), args.vocab_size).tokens
    rows = Rows(make("cpu", "float32"), tokens, config, Grid(0))
    count = CHECK_STEPS + WARM_UP_STEPS + args.repeats + 1  # one for the products
    batches = [rows.train(step, 0) for step in range(1, count + 1)]
    return lambda step: batches[step - 1]


class OurSide:
    """mpipar's own step, as `mpipar train` runs it. rows: see `rows_of`.

    Comm: all ranks must build it together, and call each method together.
    """

    def __init__(self, config, rows, ops, world, recorder=None):
        self.config, self.ops, self.recorder = config, ops, recorder or Recorder()
        self.worker = worker_of(config, world, ops, self.recorder)
        self.rows, self.dp_rank = rows, self.worker.grid.place("dp")

    def batches(self, step) -> list[Batch]:
        """Return this rank's microbatches of a step."""
        batch, count = self.rows(step), self.config.grid.num_microbatches
        size = len(batch.tokens) // (self.config.grid.dp * count)
        starts = [(self.dp_rank * count + mb) * size for mb in range(count)]
        return [
            Batch(
                *(
                    self.ops.asarray(x)
                    for x in (
                        batch.tokens[start : start + size],
                        batch.targets[start : start + size],
                        batch.positions,
                    )
                )
            )
            for start in starts
        ]

    def forward_backward(self, step):
        """Return the mean loss of all rows; keep the gradient norm for `update`."""
        loss, self.norm, _ = self.worker.gradients(step, self.batches(step).__getitem__)
        return loss

    def update(self, step):
        """Clip and apply the gradients."""
        self.worker.gradsync.clip(self.norm, self.config.train.clip)
        self.worker.optimizer.step(learning_rate(self.config.train, step), step)

    def synchronize(self):
        """Wait for the device."""
        self.ops.synchronize()


class TorchSide(TorchDecoder):
    """PyTorch's step on the rows of each step. rows: see `rows_of`."""

    def __init__(self, torch, config, rows, weights, **how):
        super().__init__(torch, config, rows(1), weights, **how)
        self.rows = rows

    def forward_backward(self, step):
        self.read(self.rows(step))
        return super().forward_backward(step)


def torch_side(torch, args, rows, **how) -> TorchSide:
    """Return PyTorch's step, from the weights that every layout of ours starts from.

    how: whether it is compiled, and what is fused, see `TorchDecoder`.
    """
    config = configure(args, {}, 1)
    alone = worker_of(config, OneRank("none is needed"), make("cpu", "float32"))
    weights = {param.name: param.data for stage in alone.stages.values() for param in stage.params}
    return TorchSide(
        torch,
        config,
        rows,
        weights,
        device=args.device,
        dtype=getattr(torch, args.dtype),
        loss_scale=alone.loss_scale.value,
        **how,
    )


def step_flops(args) -> int:
    """Return the FLOPs of all products of one step (2 M K N each), counted on shapes.

    With P elements in the matrices of blocks and head, that is 6 B T P + 12 L B T^2 D. The first
    term has 2 operations forward and 4 backward per element and token. The second has attention's
    two products; the hidden half counts. The shapes are those of a CPU, where a table has no rows
    of padding.
    """
    config = configure(args, {}, 1)
    return sum(predict(replace(config, run=replace(config.run, device="cpu")), 0).flops.values())


def losses(sides, names, world) -> dict[str, list[float]]:
    """Return {name: losses of the first steps}, on every rank that runs the side.

    Comm: the sides', and quiet barriers.
    """
    found = {name: [] for name in names}
    for step in range(1, CHECK_STEPS + 1):
        for name in names:
            quiet_barrier(world)
            if name in sides:
                found[name].append(sides[name].forward_backward(step))
                sides[name].update(step)
    quiet_barrier(world)  # a rank that spins in MPI would slow down the last side's threads
    return found


def measure_steps(sides, names, repeats, world) -> np.ndarray:
    """Return (names, repetitions, three) of this rank: seconds of both parts, and in communication.

    The sides take turns; a rank that has no part in one sleeps. Comm: a barrier before each step of
    each side and at the end, and the sides' own.
    """
    first = CHECK_STEPS + 1
    seconds = np.zeros((len(names), repeats, 3))
    for step in range(first, first + WARM_UP_STEPS + repeats):
        for number, name in enumerate(names):
            time.sleep(SETTLE_SECONDS)
            quiet_barrier(world)
            if name not in sides:
                continue
            side, times = sides[name], [time.perf_counter()]
            recorder = getattr(side, "recorder", None)
            before = recorder.comm_ns() if recorder else 0
            for part in PARTS:
                getattr(side, part)(step)
                side.synchronize()
                times.append(time.perf_counter())
            inside = (recorder.comm_ns() - before) * 1e-9 if recorder else 0.0
            if step >= first + WARM_UP_STEPS:
                seconds[number, step - first - WARM_UP_STEPS] = (*np.diff(times), inside)
    quiet_barrier(world)
    return seconds


class Noting:
    """NumPy ops that also note their products."""

    def __init__(self, noted: list):
        self.noted = noted

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, x, y, out):
        """Multiply, and note the operands and the result."""
        self.noted.append((x, y, out))
        return np.matmul(x, y, out=out)


def products_of(side, step: int) -> list[tuple]:
    """Return (left, right, result) of every product of a step of a side without other ranks."""
    noted, multiply = [], numpy_ops._product

    def product(x, w):
        y = multiply(x, w)
        noted.append((x, w, y))
        return y

    with patch.object(numpy_ops, "np", Noting(noted)), patch.object(numpy_ops, "_product", product):
        side.forward_backward(step)
    return noted


def flops(products) -> int:
    """Return the floating-point operations of all products."""
    return sum(2 * prod(result.shape) * left.shape[-1] for left, _, result in products)


class Products:
    """A side that multiplies and does nothing else.

    matmul: of a library. convert: turns one of NumPy's arrays into the library's, on the same
    memory.
    """

    def __init__(self, products, matmul=np.matmul, convert=lambda x: x):
        self.matmul, self.flops = matmul, flops(products)
        self.products = [tuple(map(convert, one)) for one in products]

    def forward_backward(self, step):
        """Multiply all."""
        for left, right, result in self.products:
            self.matmul(left, right, out=result)

    def update(self, step):
        """Do nothing: there is nothing to update."""

    def synchronize(self):
        """Do nothing: there is nothing to wait for on a CPU."""
