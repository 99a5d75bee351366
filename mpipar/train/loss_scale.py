"""The loss scale of float16: without it most gradients would round to zero.

The smallest float16 number is 6e-8. A power of two multiplies the loss before the backward pass,
and the summed gradients are divided by it. If any rank finds a gradient that is not finite, all
ranks skip the step. Source: Micikevicius et al., arXiv 1710.03740; factors and interval are those
of PyTorch's GradScaler.
"""

from __future__ import annotations

import math

FIRST, INTERVAL = 2.0**16, 2000  # PyTorch's
SMALLEST = 1.0  # gradients that overflow at this scale are not the scale's fault


class LossScale:
    """`value` halves after a step that overflowed and doubles after `interval` good ones.

    Every rank has the same value, because `update` tells all of them the same. dynamic: false for
    types with the range of float32, whose scale stays 1. skipped: number of steps so far without an
    update.
    """

    def __init__(self, run):
        self.dynamic = run.dtype == "float16"
        self.value = (run.loss_scale or FIRST) if self.dynamic else 1.0
        self.interval = run.loss_scale_interval or INTERVAL
        self.good = self.skipped = 0

    def update(self, overflow: bool) -> None:
        """Adapt the scale. overflow: whether this step's gradients overflowed on any rank."""
        if not self.dynamic:
            return
        if overflow:
            self.value, self.good = self.value / 2, 0
            self.skipped += 1
            return
        self.good += 1
        if self.good == self.interval:
            self.value, self.good = self.value * 2, 0

    def state(self) -> dict:
        """All that later steps depend on, for a checkpoint."""
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    def restore(self, state: dict) -> None:
        """Go on from what `state` gave."""
        self.value, self.good, self.skipped = (state[name] for name in ("value", "good", "skipped"))

    def can_skip(self) -> bool:
        """Whether a smaller scale could help a step whose gradients are not finite."""
        return self.dynamic and self.value > SMALLEST


def loss_scale_problems(config) -> list[str]:
    """What is wrong with the loss scale's flags: given without float16, or not a power of two."""
    run = config.run
    found = []
    for flag, value in (("--loss-scale", run.loss_scale),
                        ("--loss-scale-interval", run.loss_scale_interval)):
        if value is not None and run.dtype != "float16":
            found.append(f"{flag} {value:g}: is for --dtype float16, whose gradients underflow"
                         f" without it; {run.dtype} needs none: leave it out")
    if run.loss_scale is not None and math.frexp(run.loss_scale)[0] != 0.5:
        found.append(f"--loss-scale {run.loss_scale:g}: must be a power of two, so that it does"
                     f" not round; use {2.0**round(math.log2(run.loss_scale))}")
    return found
