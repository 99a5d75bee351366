"""Optimizers over flat buffers of master weights.

Weight decay is decoupled. It applies to matrices and embedding tables, not to biases and norms.
"""

from __future__ import annotations

TITLES = {"master": "weights", "m": "first moment", "v": "second moment"}  # of what `state` gives


class Sgd:
    """master -= lr * grad.

    SGD has no moments and no decay, so a wrong gradient scale shows at once.
    """

    kinds = ()  # of moments

    def __init__(self, ops, stages, config):
        self.ops, self.stages = ops, stages

    def step(self, lr: float, step: int) -> None:
        """Update all parameters of this rank; step counts from 1."""
        for stage in self.stages.values():
            self.ops.sgd_step(stage.flat.master, stage.flat.grad, lr)
            stage.flat.publish()

    def state(self) -> dict:
        """{kind: {stage: flat buffer}} of all buffers that an update reads and changes."""
        return {"master": {number: stage.flat.master for number, stage in self.stages.items()}}


class AdamW(Sgd):
    """Adam with decoupled weight decay (arXiv 1711.05101), with two moments per parameter."""

    kinds = ("m", "v")

    def __init__(self, ops, stages, config):
        super().__init__(ops, stages, config)
        self.config = config
        self.moments = {
            kind: {number: ops.zeros(stage.flat.grad.shape, ops.statistics, label="optimizer")
                   for number, stage in stages.items()}
            for kind in self.kinds}

    def step(self, lr: float, step: int) -> None:
        """Update all parameters of this rank; step counts from 1."""
        config = self.config
        for number, stage in self.stages.items():
            flat = stage.flat
            m, v = (self.moments[kind][number] for kind in self.kinds)
            for decay, run in flat.by_decay:
                rounded = None if flat.data is flat.master else flat.data[run]
                self.ops.adamw_step(
                    flat.master[run], flat.grad[run], m[run], v[run], lr=lr, beta1=config.beta1,
                    beta2=config.beta2, eps=config.eps,
                    weight_decay=config.weight_decay if decay else 0.0, step=step, copy=rounded)

    def state(self) -> dict:
        return super().state() | self.moments


OPTIMIZERS = {"sgd": Sgd, "adamw": AdamW}
