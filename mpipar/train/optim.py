"""Optimizers over flat buffers of master weights.

A rank updates its own piece of each segment (see `layers/shards.py`), which is everything where
nothing is shared out. Behind each update the ranks that share gather the new weights.

Weight decay is decoupled. It applies to matrices and embedding tables, not to biases and norms.
"""

from __future__ import annotations

TITLES = {"master": "weights", "m": "first moment", "v": "second moment"}  # of what `state` gives


class Sgd:
    """master -= lr * grad.

    SGD has no moments and no decay, so a wrong gradient scale shows at once.
    """

    kinds = ()  # of moments

    def __init__(self, ops, stages, config, shared):
        self.ops, self.stages, self.config, self.shared = ops, stages, config, shared

    def step(self, lr: float, step: int) -> None:
        """Update all parameters of this rank; step counts from 1.

        Comm: where ranks share master weights, but not weights: one all-gather per segment.
        """
        pending = []
        for number, stage in self.stages.items():
            flat = stage.flat
            for segment, (*_, run) in enumerate(flat.segments):
                self.update(number, flat, segment, lr, step)
                if flat.is_whole(flat.data):
                    parts = flat.data[run].reshape(self.shared.size, -1)
                    pending.append(self.shared.iall_gather(parts, "weights.bucket"))
        for one in pending:
            one.wait()

    def update(self, number: int, flat, segment: int, lr: float, step: int) -> None:
        """Update the own piece of a segment of stage `number`, and round it to the data."""
        master, data = flat.piece(flat.master, segment), flat.piece(flat.data, segment)
        self.ops.sgd_step(master, flat.summed[segment], lr)
        if flat.data is not flat.master:
            self.ops.copy(data, master)

    def state(self) -> dict:
        """{kind: {stage: flat buffer}} of all buffers that an update reads and changes."""
        return {"master": {number: stage.flat.master for number, stage in self.stages.items()}}


class AdamW(Sgd):
    """Adam with decoupled weight decay (arXiv 1711.05101), with two moments per parameter."""

    kinds = ("m", "v")

    def __init__(self, ops, stages, config, shared):
        super().__init__(ops, stages, config, shared)
        self.moments = {
            kind: {number: ops.zeros((stage.flat.own_size,), ops.statistics, label="optimizer")
                   for number, stage in stages.items()}
            for kind in self.kinds}

    def update(self, number: int, flat, segment: int, lr: float, step: int) -> None:
        config = self.config
        moments = (self.moments[kind][number] for kind in self.kinds)
        master, data, m, v = (
            flat.piece(buffer, segment) for buffer in (flat.master, flat.data, *moments))
        self.ops.adamw_runs(
            master, flat.summed[segment], m, v, flat.updates[segment], lr=lr, beta1=config.beta1,
            beta2=config.beta2, eps=config.eps, weight_decay=config.weight_decay, step=step,
            copy=None if flat.data is flat.master else data)

    def state(self) -> dict:
        return super().state() | self.moments


OPTIMIZERS = {"sgd": Sgd, "adamw": AdamW}
