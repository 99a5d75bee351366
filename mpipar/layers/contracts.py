"""The interface of this folder as a type: a layer.

Every layer splits its backward pass into two halves, because some schedules run them at different
times. backward_input needs what forward left in the stash, and backward_weight what backward_input
left. After backward_weight nothing of the layer is left in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpipar.layers.param import Param
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class Layer(Protocol):
    """A layer of any kind.

    params: those of the layer and of the layers within it. The first layer of a model takes x =
    None and returns dx = None; the loss returns a number and takes dy = None.
    """

    @property
    def params(self) -> Sequence[Param]: ...

    def forward(self, x: Array, stash: Stash, /) -> Array:
        """Return y, and keep in the stash what backward_input needs."""

    def backward_input(self, dy: Array, stash: Stash, /) -> Array:
        """Return dx, and keep in the stash what backward_weight needs."""

    def backward_weight(self, stash: Stash, /) -> None:
        """Add to the gradients of the parameters, without reading any weight."""
