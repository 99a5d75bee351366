"""The learning rate of a step: a warm-up, then as `--lr-schedule` says."""

from __future__ import annotations

import math


def fall(name: str, done: float) -> float:
    """Which share of the fall from peak to last learning rate is left when `done` of it is over.

    Both go from 0 to 1. cosine: arXiv 1608.03983, without restarts. wsd (warm-up, stable, decay):
    1 - sqrt, which arXiv 2405.18392 found best for a short fall behind a constant rate.
    """
    if name == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - (math.sqrt(done) if name == "wsd" else done)


def fall_start(config) -> int:
    """The last step with the peak learning rate before it falls. config: a TrainConfig."""
    if config.lr_schedule != "wsd":
        return config.warmup_steps
    return max(config.warmup_steps, config.steps - max(1, round(config.decay_ratio * config.steps)))


def learning_rate(config, step: int) -> float:
    """Learning rate of `step`, which counts from 1: a linear warm-up, then as --lr-schedule says.

    It falls from `lr` to min_lr_ratio * lr, which it has in the last step.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    start, low = fall_start(config), config.min_lr_ratio * config.lr
    if config.lr_schedule == "constant" or step <= start:
        return config.lr
    done = min(1.0, (step - start) / max(1, config.steps - start))
    return low + (config.lr - low) * fall(config.lr_schedule, done)


def of_new_length(config) -> str:
    """What becomes of the learning rate of a run that goes on with another number of steps."""
    if config.lr_schedule == "constant":
        return "the learning rate stays what it is"
    if config.lr_schedule == "wsd":
        return f"the learning rate has its peak up to step {fall_start(config)}, and falls then"
    return "the learning rate of each further step is that of the new length"
