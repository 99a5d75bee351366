"""The sides that bench.step compares: a training step of ours on this rank, and PyTorch's.

A side has `forward_backward(step)`, which returns the loss and finishes all gradients,
`update(step)` and `synchronize()`; steps count from 1.
"""

from __future__ import annotations

import time

import numpy as np

from bench.step.torch_decoder import TorchDecoder
from mpipar.comm.grid import Grid
from mpipar.comm.hosts import quiet_barrier
from mpipar.comm.record import Recorder
from mpipar.config import flags
from mpipar.config.arch import ARCHS
from mpipar.config.grid import GridConfig
from mpipar.config.model import model_config
from mpipar.config.resolve import resolve
from mpipar.config.run import RunConfig
from mpipar.config.sections import Config
from mpipar.config.train import TrainConfig
from mpipar.data.rows import Batch
from mpipar.ops import make
from mpipar.plan.predict import predict
from mpipar.train.learning_rate import learning_rate
from mpipar.train.worker import Worker

PARTS = ("forward_backward", "update")
CHECK_STEPS, WARM_UP_STEPS = 3, 2
SETTLE_SECONDS = 0.02  # threads of PyTorch spin for a while after its step


def add_sizes(parser) -> None:
    """Add the flags of the model's sizes and of the number of steps."""
    parser.add_argument("--arch", choices=tuple(ARCHS), default="gpt2", help="(gpt2)")
    parser.add_argument("--kv-heads", type=flags.count, help="heads of keys (as many as queries)")
    for name, default, text in (
        ("layers", 6, "transformer blocks"),
        ("d-model", 384, "model width"),
        ("heads", 6, "attention heads"),
        ("seq-len", 256, "tokens per row"),
        ("batch-size", 4, "rows per step"),
        ("vocab-size", 256, "tokens in the vocabulary"),
        ("repeats", 20, "timed steps"),
    ):
        parser.add_argument(f"--{name}", type=flags.count, default=default,
                            help=f"{text} ({default})")


def configure(args, layout: dict, num_ranks: int):
    """The resolved configuration of the model in a layout: settings of the grid."""
    model = model_config({
        "arch": args.arch, "layers": args.layers, "d_model": args.d_model, "heads": args.heads,
        "kv_heads": args.kv_heads, "seq_len": args.seq_len, "vocab_size": args.vocab_size})
    train = TrainConfig(batch_size=args.batch_size, warmup_steps=0)
    axes = {"dp": 1, "pp": 1, "tp": 1, "num_microbatches": 1} | layout
    run = RunConfig(device=args.device, dtype=args.dtype)
    config, _ = resolve(
        Config(model, GridConfig(**axes), train, run), num_ranks)
    return config


def random_batch(args) -> Batch:
    """The same rows of tokens on every rank."""
    shape = (args.batch_size, args.seq_len + 1)
    tokens = np.random.default_rng(0).integers(0, args.vocab_size, shape)
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(args.seq_len))


class OurSide:
    """mpipar's own step, as `mpipar train` runs it. batch: the rows of all replicas.

    Comm: all ranks must build it together, and call each method together.
    """

    def __init__(self, config, batch, ops, world):
        self.config, self.ops, self.recorder = config, ops, Recorder()
        grid = Grid.of(config.grid, world.rank)
        self.worker = Worker(config, grid, ops, self.recorder, world if world.size > 1 else None)
        self.worker.initialize()
        count = config.grid.num_microbatches
        rows = len(batch.tokens) // (config.grid.dp * count)
        starts = [(grid.dp_rank * count + mb) * rows for mb in range(count)]
        self.batches = [Batch(*(ops.asarray(x) for x in (
            batch.tokens[start:start + rows], batch.targets[start:start + rows],
            batch.positions))) for start in starts]

    def forward_backward(self, step):
        """Return the mean loss of all rows; keep the gradient norm for `update`."""
        loss, self.norm, _ = self.worker.gradients(step, self.batches.__getitem__)
        return loss

    def update(self, step):
        """Clip and apply the gradients."""
        self.worker.gradsync.clip(self.norm, self.config.train.clip)
        self.worker.optimizer.step(learning_rate(self.config.train, step), step)

    def synchronize(self):
        """Wait for the device."""
        self.ops.synchronize()


def torch_side(torch, args, batch, **how) -> TorchDecoder:
    """PyTorch's step, from the weights that every layout of ours starts from.

    how: whether it is compiled and whether attention is fused, see `TorchDecoder`.
    """
    config = configure(args, {}, 1)
    alone = Worker(config, Grid(0), make("cpu", "float32"), Recorder())
    alone.initialize()
    weights = {param.name: param.data for stage in alone.stages.values()
               for param in stage.flat.params}
    return TorchDecoder(torch, config, batch, weights, device=args.device,
                        dtype=getattr(torch, args.dtype), loss_scale=alone.loss_scale.value, **how)


def step_flops(args) -> int:
    """Floating-point operations of all products of one step (2 M K N each), counted on shapes.

    With P elements in the matrices of blocks and head, that is 6 B T P + 12 L B T^2 D. The first
    term has 2 operations forward and 4 backward per element and token. The second has attention's
    two products; the hidden half counts.
    """
    return sum(predict(configure(args, {}, 1), 0).flops.values())


def losses(sides, names, world) -> dict[str, list[float]]:
    """Name -> losses of the first steps, on every rank that runs the side. Comm: the sides'."""
    found = {name: [] for name in names}
    for step in range(1, CHECK_STEPS + 1):
        for name in names:
            quiet_barrier(world)
            if name in sides:
                found[name].append(sides[name].forward_backward(step))
                sides[name].update(step)
    return found


def measure_steps(sides, names, repeats, world) -> np.ndarray:
    """(names, repetitions, three) of this rank: seconds of both parts, and those in communication.

    The sides take turns; a rank that has no part in one sleeps. Comm: a barrier before each step
    of each side, and the sides' own.
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
    return seconds
