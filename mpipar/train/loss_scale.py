"""The loss scale of float16, without which most gradients would round to zero.

The smallest float16 number is 6e-8. The loss is multiplied by a power of two before the backward
pass, and the summed gradients are divided by it. If any rank finds a gradient that is not finite,
all ranks skip the step. Source: Micikevicius et al., arXiv 1710.03740; factors and interval are
those of PyTorch's GradScaler.
"""

from __future__ import annotations

import math

from mpipar.config.run import RunConfig


class LossScale:
    """The factor of the loss, which halves when gradients overflow and doubles after good steps.

    It is the same on every rank, because `adapt` gets the same norm on all of them. dynamic: false
    for types with the range of float32, whose scale stays 1. skipped: number of steps so far
    without an update.
    """

    FIRST, INTERVAL = 2.0**16, 2000  # PyTorch's
    SMALLEST = 1.0  # the scale is not to blame for gradients that still overflow at this value

    def __init__(self, run: RunConfig):
        self.dynamic = run.dtype == "float16"
        self.value: float = (run.loss_scale or self.FIRST) if self.dynamic else 1.0
        self.interval = self.INTERVAL
        self.good = self.skipped = 0

    def adapt(self, norm: float) -> bool:
        """Adapt the scale to a step's gradient norm; return whether the weights stay as they are.

        A step whose gradients are not finite is skipped only if a smaller scale could help it.
        """
        if math.isfinite(norm):
            self.good += 1
            if self.good == self.interval:
                self.value, self.good = self.value * 2, 0
            return False
        helps = self.value > self.SMALLEST
        self.value, self.good, self.skipped = self.value / 2, 0, self.skipped + 1
        return helps

    def state(self) -> dict[str, float]:
        """Return everything that later steps depend on, for a checkpoint."""
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from what `state` returned."""
        self.value, self.good, self.skipped = (
            state["value"],
            int(state["good"]),
            int(state["skipped"]),
        )
