"""The base of a model's stages: a contiguous run of layers with its passes and parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from mpipar.layers.context import Context
from mpipar.layers.flat import flats_of
from mpipar.layers.loss import CrossEntropy
from mpipar.layers.param import Param
from mpipar.layers.stash import Batch, Layer, Stash
from mpipar.ops.signature import Array


class PassHooks(Protocol):
    """What runs a stage's passes and is told where they are: the engine."""

    def enter(self, unit: int) -> None: ...
    def leave(self, unit: int) -> None: ...


class PipelineStage:
    """Layers in order, and their parameters in flat buffers; a model's Stage derives from it.

    units: lists of layers. A unit is what comes before the blocks, a block, or what comes after
    them. flats: see `flats_of`. loss: the last layer on the last stage, else None.
    params_of_other_stages: names of parameters that another stage's buffers hold. width: of the
    stream between stages.

    Every pass takes the object that runs it, `engine`, and calls engine.enter(unit) before it
    touches a unit and engine.leave(unit) when it is done with it. Units are counted from the first.
    """

    def __init__(
        self,
        context: Context,
        stage: int,
        units: Sequence[Sequence[Layer]],
        width: int,
        *,
        loss: CrossEntropy | None = None,
        params_of_other_stages: Collection[str] = (),
    ):
        self.ops, self.stage, self.units, self.loss = context.ops, stage, units, loss
        self.recorder, self.factor = context.comms.recorder, context.factor
        self.token_layout, self.width = context.token_layout, width
        # There is one Param per name: a tied table may be in two layers here, or belong to another
        # stage's buffers. Its gradient is complete with that of the first unit that has it.
        own: dict[str, Param] = {}
        for unit, layers in enumerate(units):
            for param in (param for layer in layers for param in layer.params):
                if param.name not in params_of_other_stages and param.name not in own:
                    own[param.name] = param
                    param.unit = unit
        self.flats = flats_of(
            own.values(), context.make_flat, context.ops, context.comms, context.rules
        )

    @property
    def params(self) -> list[Param]:
        """The parameters of the stage's buffers."""
        return [param for flat in self.flats for param in flat.params]

    def in_shape(self, batch: Batch) -> tuple[int, ...]:
        """Return the shape of activations between stages: (B, tokens held, D)."""
        return (batch.shape[0], self.token_layout.length(batch.shape[1]), self.width)

    def set_loss_scale(self, scale: float) -> None:
        """Set the factor of the losses' gradients: loss scale / targets in the global batch."""
        self.factor.value = scale

    def forward(self, x: Array, stash: Stash, engine: PassHooks) -> Array:
        """Return activations for the next stage; on the last stage the sum of the losses."""
        for unit, layers in enumerate(self.units):
            engine.enter(unit)
            for layer in layers:
                x = layer.forward(x, stash)
            engine.leave(unit)
        return x

    def backward_input(self, dy: Array, stash: Stash, engine: PassHooks) -> Array:
        """Return dx for the previous stage; dy is None on the last stage."""
        for unit, layers in self._last_first():
            engine.enter(unit)
            for layer in reversed(layers):
                dy = layer.backward_input(dy, stash)
            engine.leave(unit)
        return dy

    def backward_weight(self, stash: Stash, engine: PassHooks) -> None:
        """Accumulate all gradients of the stage; afterwards the stash is empty."""
        for unit, layers in self._last_first():
            engine.enter(unit)
            for layer in reversed(layers):
                layer.backward_weight(stash)
            engine.leave(unit)
        assert not stash, f"stage {self.stage} left {list(stash)} in the stash"

    def backward(self, dy: Array, stash: Stash, engine: PassHooks) -> Array:
        """Run both halves layer by layer, so that each layer's stash is freed early; return dx."""
        for unit, layers in self._last_first():
            engine.enter(unit)
            for layer in reversed(layers):
                dy = layer.backward_input(dy, stash)
                with self.recorder.at("W"):
                    layer.backward_weight(stash)
            engine.leave(unit)
        assert not stash, f"stage {self.stage} left {list(stash)} in the stash"
        return dy

    def _last_first(self) -> Iterator[tuple[int, Sequence[Layer]]]:
        """Return (unit, its layers) from the last unit to the first."""
        return reversed(list(enumerate(self.units)))
