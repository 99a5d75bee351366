"""Optimizers over flat buffers of master weights, and the learning rate of a step.

Weight decay is decoupled and applies to matrices and embedding tables; biases and norms are exempt.
"""

from __future__ import annotations

import math


class Sgd:
    """master -= lr * grad. No state, no decay: a wrong gradient scale shows at once."""

    def __init__(self, ops, stages, config):
        self.ops, self.stages = ops, stages

    def step(self, lr: float, step: int) -> None:
        """Update all parameters of this rank; step counts from 1. Comm: none."""
        for stage in self.stages.values():
            self.ops.sgd_step(stage.flat.master, stage.flat.grad, lr)
            stage.flat.publish()


class AdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101), with two moments per parameter."""

    def __init__(self, ops, stages, config):
        self.ops, self.stages, self.config = ops, stages, config
        self.moments = {
            number: tuple(ops.zeros(stage.flat.grad.shape, ops.statistics, label="optimizer")
                          for _ in range(2))
            for number, stage in stages.items()
        }

    def step(self, lr: float, step: int) -> None:
        """Update all parameters of this rank; step counts from 1. Comm: none."""
        config = self.config
        for number, stage in self.stages.items():
            flat, (m, v) = stage.flat, self.moments[number]
            for decay, run in flat.runs(lambda param: param.decay):
                rounded = None if flat.data is flat.master else flat.data[run]
                self.ops.adamw_step(
                    flat.master[run], flat.grad[run], m[run], v[run], lr, config.beta1,
                    config.beta2, config.eps, config.weight_decay if decay else 0.0, step, rounded)


OPTIMIZERS = {"sgd": Sgd, "adamw": AdamW}


def learning_rate(config, step: int) -> float:
    """Learning rate of `step` (from 1): linear warm-up, then a cosine down to min_lr_ratio * lr."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    span = max(1, config.steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    low = config.min_lr_ratio * config.lr
    return low + (config.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))
