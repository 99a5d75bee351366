"""What the stages of all models share: each is a contiguous run of layers."""

from __future__ import annotations

from typing import NamedTuple

from mpipar.layers.flat import FlatParams


class LayerRun:
    """Layers in order, and their parameters in flat buffers; a model's Stage derives from it.

    units: lists of layers, each with forward, backward_input, backward_weight and params. A unit is
    what comes before the blocks, a block, or what comes after them. loss: the last layer on the
    last stage, else None. elsewhere: names of parameters that another stage's buffers hold. The
    model gives in_shape(batch) and out_shape(batch), the shapes of the activations that enter and
    leave.

    Every pass takes the object that runs it, `engine`. It calls engine.enter(unit) before it
    touches a unit, and engine.leave(unit) when it is done with it. Units count from the first.
    """

    def __init__(self, context, stage, units, *, loss=None, elsewhere=()):
        self.ops, self.stage, self.units, self.loss = context.ops, stage, units, loss
        self.recorder = context.comms.recorder
        # There is one Param per name: a tied table may be in two layers here, or belong to another
        # stage's buffers. Its gradient is complete with that of the first unit that has it.
        own = {}
        for unit, layers in enumerate(units):
            for param in (param for layer in layers for param in layer.params):
                if param.name not in elsewhere and param.name not in own:
                    own[param.name] = param
                    param.unit = unit
        self.flat = FlatParams(context.ops, own.values(), context.sharding)

    def set_loss_scale(self, scale: float) -> None:
        """Set the loss's backward factor: loss scale / number of targets in the global batch."""
        if self.loss is not None:
            self.loss.scale = scale

    def forward(self, x, stash, engine):
        """Activations for the next stage; on the last stage the sum of the losses."""
        for unit, layers in enumerate(self.units):
            engine.enter(unit)
            for layer in layers:
                x = layer.forward(x, stash)
            engine.leave(unit)
        return x

    def backward_input(self, dy, stash, engine):
        """dx for the stage before; dy is None on the last stage."""
        for unit, layers in self._last_first():
            engine.enter(unit)
            for layer in reversed(layers):
                dy = layer.backward_input(dy, stash)
            engine.leave(unit)
        return dy

    def backward_weight(self, stash, engine):
        """Accumulate all gradients of the stage; afterwards the stash is empty."""
        for unit, layers in self._last_first():
            engine.enter(unit)
            for layer in reversed(layers):
                layer.backward_weight(stash)
            engine.leave(unit)
        assert not stash, f"stage {self.stage} left {list(stash)} in the stash"

    def backward(self, dy, stash, engine):
        """Run both halves layer by layer, so that each layer's stash is freed early."""
        for unit, layers in self._last_first():
            engine.enter(unit)
            for layer in reversed(layers):
                self.recorder.phase = "I"
                dy = layer.backward_input(dy, stash)
                self.recorder.phase = "W"
                layer.backward_weight(stash)
            engine.leave(unit)
        assert not stash, f"stage {self.stage} left {list(stash)} in the stash"
        return dy

    def _last_first(self):
        """(unit, its layers) from the last unit to the first."""
        return reversed(list(enumerate(self.units)))


def stage_parts(stage: int, stage_layers: tuple[int, ...]) -> tuple[range, bool, bool]:
    """Block indices of a stage, whether it is the first, whether it is the last."""
    first = sum(stage_layers[:stage])
    blocks = range(first, first + stage_layers[stage])
    return blocks, stage == 0, stage == len(stage_layers) - 1


class UnitFlops(NamedTuple):
    """FLOPs of the products in a model's forward: the layers below the blocks, a block, the head.

    They are per image or per token; only their ratios count.
    """

    entry: float
    block: float
    head: float


def stage_flops(units: UnitFlops, stage_layers, stage: int) -> tuple[float, float]:
    """FLOPs of a stage's forward: (entry and blocks, head)."""
    blocks, is_first, is_last = stage_parts(stage, tuple(stage_layers))
    return len(blocks) * units.block + is_first * units.entry, is_last * units.head


def balanced_layers(layers: int, units: UnitFlops, stages_by_rank) -> tuple[int, ...]:
    """Blocks per stage such that the busiest pipeline rank has as few FLOPs as possible.

    stages_by_rank: the stages that each rank holds. A stage may hold no block.

    Each block in turn goes to the least busy rank, and there to the least busy stage. All blocks
    cost the same, so no other split has a less busy busiest rank. Of equal ranks the later one
    takes the block, since the first ranks stash more microbatches. Of equal stages the earlier one
    takes it.
    """
    ranks = list(dict.fromkeys(map(tuple, stages_by_rank)))  # two mirror ranks hold the same stages
    num_stages = 1 + max(stage for stages in ranks for stage in stages)
    split, flops = [0] * num_stages, [0] * num_stages
    flops[0] += units.entry
    flops[-1] += units.head
    for _ in range(layers):
        least_busy = min(reversed(ranks), key=lambda stages: sum(flops[stage] for stage in stages))
        stage = min(least_busy, key=flops.__getitem__)
        split[stage] += 1
        flops[stage] += units.block
    return tuple(split)
