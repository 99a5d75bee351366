"""What all ranks decide together about a step: to stop, to save, or to skip it (float16)."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from mpipar.config.run import RunConfig


@dataclass(frozen=True)
class StepVotes:
    """One rank's votes in a step and, after the all-reduce, the decision that all ranks act on.

    stop, save: whether this rank asks for it; decision: whether any rank does. written: whether
    this rank has written its part of a checkpoint in the background; decision: whether every rank
    has. Islands decide for themselves, and act only where they meet.
    """

    stop: bool = False
    save: bool = False
    written: bool = False


class OneIsland:
    """All ranks take every step together: nothing is left to do at its end.

    begun: whether islands have taken steps since they last met. interval: steps from one meeting to
    the next.
    """

    begun = False
    interval = 1

    def begin(self) -> None:
        """Prepare for a step."""

    def meets(self, step: int) -> bool:
        """Return whether all ranks have the same weights after a step."""
        return True

    def end(self, step: int, agreed: StepVotes) -> StepVotes:
        """Finish a step; return what all ranks have decided. agreed: what this island has."""
        return agreed

    def in_place(self) -> AbstractContextManager[None]:
        """Let layers read the weights that all ranks share inside the block."""
        return nullcontext()


class Decision(NamedTuple):
    """What becomes of a step.

    update: its number among the updates: a skipped step uses up no warm-up. scale: of its backward
    pass, None where nothing is scaled. skipped: whether the weights stay as they are, because
    gradients overflowed.
    """

    update: int
    scale: float | None
    skipped: bool


class LossScale:
    """The factor of a float16 loss, without which most gradients would round to zero.

    The smallest float16 number is 6e-8. The loss is multiplied by a power of two before the
    backward pass, and the summed gradients are divided by it. If any rank finds a gradient that is
    not finite, all ranks skip the step. Source: Micikevicius et al., arXiv 1710.03740; factors and
    interval are those of PyTorch's GradScaler.

    `value` halves after a step that overflowed and doubles after `interval` good ones. It is the
    same on every rank, because `update` gets the same argument on all of them. dynamic: false for
    types with the range of float32, whose scale stays 1. skipped: number of steps so far without an
    update.
    """

    FIRST, INTERVAL = 2.0**16, 2000  # PyTorch's
    SMALLEST = 1.0  # the scale is not to blame for gradients that still overflow at this value

    def __init__(self, run: RunConfig):
        self.dynamic = run.dtype == "float16"
        self.value: float = (run.loss_scale or self.FIRST) if self.dynamic else 1.0
        self.interval = self.INTERVAL
        self.good = self.skipped = 0

    def decide(self, step: int, norm: float) -> Decision:
        """Return what becomes of a step with this gradient norm, and adapt the scale."""
        overflow = not math.isfinite(norm)
        shown = self.value if self.dynamic else None
        decided = Decision(step - self.skipped, shown, overflow and self.can_skip())
        self.update(overflow)
        return decided

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

    def can_skip(self) -> bool:
        """Return whether a smaller scale could help a step whose gradients are not finite."""
        return self.dynamic and self.value > self.SMALLEST
