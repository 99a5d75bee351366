"""The sides that bench.step compares: a training step of ours on this rank, and PyTorch's.

A side has `forward_backward(step)`, which returns the loss and finishes all gradients,
`update(step)` and `synchronize()`; steps count from 1.
"""

from __future__ import annotations

import numpy as np

from bench.torch_decoder import TorchDecoder
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.config.grid import GridConfig
from mpipar.config.model import DecoderConfig
from mpipar.config.resolve import resolve
from mpipar.config.run import RunConfig
from mpipar.config.sections import Config
from mpipar.config.train import TrainConfig
from mpipar.data.rows import Batch
from mpipar.ops import make
from mpipar.plan.predict import predict
from mpipar.train.learning_rate import learning_rate
from mpipar.train.worker import Worker


def configure(args, layout: dict, num_ranks: int):
    """The resolved configuration of the model in a layout ({"dp": 2}, {"tp": 2}, {})."""
    model = DecoderConfig(layers=args.layers, d_model=args.d_model, heads=args.heads,
                        seq_len=args.seq_len, vocab_size=args.vocab_size)
    train = TrainConfig(batch_size=args.batch_size, warmup_steps=0)
    axes = {"dp": 1, "pp": 1, "tp": 1} | layout
    run = RunConfig(device=args.device, dtype=args.dtype)
    config, _ = resolve(
        Config(model, GridConfig(num_microbatches=1, **axes), train, run), num_ranks)
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
        rows = len(batch.tokens) // config.grid.dp
        own = slice(grid.dp_rank * rows, (grid.dp_rank + 1) * rows)
        self.batch = Batch(*(ops.asarray(x) for x in (
            batch.tokens[own], batch.targets[own], batch.positions)))

    def forward_backward(self, step):
        """Return the mean loss of all rows; keep the gradient norm for `update`."""
        loss, self.norm, _ = self.worker.gradients(step, lambda mb: self.batch)
        return loss

    def update(self, step):
        """Clip and apply the gradients."""
        self.worker.gradsync.clip(self.norm, self.config.train.clip)
        self.worker.optimizer.step(learning_rate(self.config.train, step), step)

    def synchronize(self):
        """Wait for the device."""
        self.ops.synchronize()


def torch_side(torch, args, batch, device="cpu", compiled=False) -> TorchDecoder:
    """PyTorch's step, from the weights that every layout of ours starts from."""
    config = configure(args, {}, 1)
    alone = Worker(config, Grid(0), make("cpu", "float32"), Recorder())
    alone.initialize()
    weights = {param.name: param.data for stage in alone.stages.values()
               for param in stage.flat.params}
    return TorchDecoder(torch, config, batch, weights, device=device, compiled=compiled,
                        dtype=getattr(torch, args.dtype), loss_scale=alone.loss_scale.value)


def step_flops(args) -> int:
    """Floating-point operations of all products of one step (2 M K N each), counted on shapes.

    With P elements in the matrices of blocks and head, that is 6 B T P + 12 L B T^2 D. The first
    term has 2 operations forward and 4 backward per element and token. The second has attention's
    two products; the hidden half counts.
    """
    return sum(predict(configure(args, {}, 1), 0).flops.values())
