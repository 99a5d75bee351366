"""The optimizer: update rules over flat buffers of master weights, and the learning rate of a step.

A rank updates its own pieces (see `layers/flat.py`), which is everything where nothing is sharded.

Weight decay is decoupled. It applies to matrices and embedding tables, not to biases and norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from mpipar.comm.groups import Comms
from mpipar.config.train import OPTIMIZERS, TrainConfig
from mpipar.layers.flat import FlatParams
from mpipar.layers.param import Param
from mpipar.ops.arrays import AdamWStep
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array


class Sgd:
    """master -= lr * grad.

    SGD has no moments and no decay, so a wrong gradient scale shows at once. flats: those that this
    rule updates; it adds its moments to them.
    """

    kinds: ClassVar[dict[str, str]] = {}  # of moments, and what they are

    def __init__(self, ops: Ops, flats: Sequence[FlatParams], config: TrainConfig, comms: Comms):
        self.ops, self.flats, self.config, self.comms = ops, flats, config, comms
        for kind in self.kinds:
            for flat in flats:
                flat.add_moment(kind)
        self.pieces = {
            flat: [flat.pieces(kind) for kind in ("master", "data", *self.kinds)] for flat in flats
        }

    def prepare(self) -> None:
        """Do what must precede the first update of a step."""

    def update(self, flat: FlatParams, number: int, lr: float, step: int) -> None:
        """Update one of this rank's pieces, and round it to the data."""
        master, data, *_ = (pieces[number] for pieces in self.pieces[flat])
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

    RATE = 0.001

    def change(self, master: Array, grad: Array, lr: float) -> None:
        self.ops.sign_step(master, grad, self.RATE)


class AdamW(Sgd):
    """Adam with decoupled weight decay (arXiv 1711.05101), with two moments per parameter."""

    kinds: ClassVar[dict[str, str]] = {"m": "first moment", "v": "second moment"}

    def update(self, flat: FlatParams, number: int, lr: float, step: int) -> None:
        config = self.config
        by = AdamWStep(lr, config.beta1, config.beta2, config.eps, config.weight_decay, step)
        master, data, m, v = (pieces[number] for pieces in self.pieces[flat])
        copy = data if flat.rounds else None
        grad, runs = flat.reduced_grads[number], flat.decay_runs[number]
        self.ops.adamw_runs(master, grad, m, v, runs, by, copy)


class Optimizer:
    """Updates all parameters of a rank, each flat buffer by its rule.

    flats: all FlatParams of the rank; each rule adds its moments to its own. rules: by name.
    """

    def __init__(
        self,
        ops: Ops,
        flats: Sequence[FlatParams],
        config: TrainConfig,
        comms: Comms,
        rules: Mapping[str, type[Sgd]],
    ):
        self.flats, self.rule_of = flats, OPTIMIZERS[config.optimizer]
        self.rules = {
            name: rules[name](ops, [flat for flat in flats if flat.rule == name], config, comms)
            for name in dict.fromkeys(self.rule_of.values())
        }

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds of all moments, and what they are."""
        return dict(one for rule in self.rules.values() for one in rule.kinds.items())

    def kinds_of(self, param: Param) -> tuple[str, ...]:
        """Return the kinds of state that an update of a parameter reads and changes."""
        return ("master", *self.rules[self.rule_of[param.role]].kinds)

    def step(self, lr: float, step: int) -> None:
        """Update all parameters of this rank; step counts from 1.

        Comm: that of the rules; with ZeRO 1, one all_gather for each segment.
        """
        pending = []
        for rule in self.rules.values():
            rule.prepare()
        for flat in self.flats:
            for number in range(len(flat.decay_runs)):
                self.rules[flat.rule].update(flat, number, lr, step)
                if flat.level == 1:
                    pending.append(flat.gather(number))
        for one in pending:
            one.wait()


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
