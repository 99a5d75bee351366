"""Update rules over flat buffers of master weights, and the learning rate of a step.

A rank updates its own pieces (see `layers/flat.py`), which is everything where nothing is sharded.

Weight decay is decoupled. It applies to matrices and embedding tables, not to biases and norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from mpipar.comm.groups import Comms
from mpipar.config.train import TrainConfig
from mpipar.layers.flat import FlatParams
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array

TITLES = {
    "master": "weights",
    "m": "first moment",
    "v": "second moment",
    "momentum": "momentum",
}  # of FlatParams.state


class Sgd:
    """master -= lr * grad.

    SGD has no moments and no decay, so a wrong gradient scale shows at once. flats: those that this
    rule updates; it adds its moments to them.
    """

    kinds: ClassVar[tuple[str, ...]] = ()  # of moments
    of_loss = True  # gradients are those of the loss: they count in the norm, and are clipped

    def __init__(self, ops: Ops, flats: Sequence[FlatParams], config: TrainConfig, comms: Comms):
        self.ops, self.flats, self.config, self.comms = ops, flats, config, comms
        for kind in self.kinds:
            for flat in flats:
                flat.add_moment(kind)

    def prepare(self) -> None:
        """Do what must precede the first update of a step."""

    def update(self, flat: FlatParams, number: int, lr: float, step: int) -> None:
        """Update one of this rank's pieces, and round it to the data."""
        master, data = (flat.piece(kind, number) for kind in ("master", "data"))
        self.change(master, flat.reduced_grads[number], lr)
        if flat.rounds:
            self.ops.copy(data, master)

    def change(self, master: Array, grad: Array, lr: float) -> None:
        """Change master weights by their gradients."""
        self.ops.sgd_step(master, grad, lr)


class Signs(Sgd):
    """Lowers a number by RATE where its gradient is positive, raises it where that is negative.

    For gradients that are not those of the loss, such as a router's excess of tokens
    (arXiv 2408.15664).
    """

    of_loss = False
    RATE = 0.001

    def change(self, master: Array, grad: Array, lr: float) -> None:
        self.ops.sign_step(master, grad, self.RATE)


class AdamW(Sgd):
    """Adam with decoupled weight decay (arXiv 1711.05101), with two moments per parameter."""

    kinds: ClassVar[tuple[str, ...]] = ("m", "v")

    def update(self, flat: FlatParams, number: int, lr: float, step: int) -> None:
        config = self.config
        master, data, m, v = (flat.piece(kind, number) for kind in ("master", "data", *self.kinds))
        self.ops.adamw_runs(
            master,
            flat.reduced_grads[number],
            m,
            v,
            flat.decay_runs[number],
            lr=lr,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            step=step,
            copy=data if flat.rounds else None,
        )


DECAY_RATIO = 0.2  # share of the steps in which wsd decays: 10 to 20% suffice (arXiv 2405.18392)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of an update: a linear warm-up, then as --lr-schedule says.

    step: the number of the update, from 1; steps that float16 skips are none. The rate falls from
    `lr` to min_lr_ratio * lr, which it reaches in the last step if none is skipped.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    start, low = fall_start(config), config.min_lr_ratio * config.lr
    if config.lr_schedule == "constant" or step <= start:
        return config.lr
    done = min(1.0, (step - start) / max(1, config.steps - start))
    return low + (config.lr - low) * fall(config.lr_schedule, done)


def fall_start(config: TrainConfig) -> int:
    """Return the last step with the peak learning rate before it falls."""
    if config.lr_schedule != "wsd":
        return config.warmup_steps
    return max(config.warmup_steps, config.steps - max(1, round(DECAY_RATIO * config.steps)))


def fall(name: str, done: float) -> float:
    """Return which fraction of the fall from peak to final learning rate is left.

    done: the fraction of its steps that are over. Both are in 0..1. cosine: arXiv 1608.03983,
    without restarts. wsd (warm-up, stable, decay): 1 - sqrt, which arXiv 2405.18392 found best for
    a short fall after a constant rate.
    """
    if name == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - (math.sqrt(done) if name == "wsd" else done)


def warm_up_notes(config: TrainConfig) -> list[str]:
    """Return a note if the run ends within its warm-up."""
    if config.warmup_steps <= config.steps or not config.steps:
        return []
    top = learning_rate(config, config.steps)
    return [
        (
            f"the run ends within its warm-up of {config.warmup_steps} steps: the learning rate"
            f" rises to {top:.2g} and never reaches {config.lr:g}"
        )
    ]
