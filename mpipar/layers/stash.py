"""A layer as a type, and the stash: what forward keeps for backward, one per (stage, microbatch).

Every layer splits its backward pass into two halves, because some schedules run them at different
times. backward_input needs what forward left in the stash, and backward_weight what backward_input
left. After backward_weight nothing of the layer is left in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mpipar.layers.param import Param
from mpipar.ops.signature import Array, Shape

if TYPE_CHECKING:
    from mpipar.layers.parallel.kv_cache import KVCache


@dataclass(frozen=True)
class Batch:
    """One microbatch: tokens and targets (B, T), and positions (T,) in their rows.

    targets is None when generating; positions may then be (B, T), one set per row. all_positions:
    those of the tokens that all ranks of cp hold, None if a rank holds them all.
    """

    tokens: Array
    targets: Array | None
    positions: Array
    all_positions: Array | None = None

    @property
    def shape(self) -> Shape:
        return self.tokens.shape


class Stash(dict[tuple[Any, str], Any]):
    """Arrays by (layer name, kind), and the microbatch they belong to, for layers that read it.

    cache: what keeps keys and values while text is generated (see parallel/kv_cache.py).

    No array in it may alias a buffer that a later receive writes. The engine therefore receives
    every message into a new buffer, which then belongs to the layers.
    """

    def __init__(self, batch: Batch | None = None, cache: KVCache | None = None) -> None:
        super().__init__()
        self.batch: Batch = batch  # type: ignore[assignment]  # None: no layer here reads it
        self.cache = cache

    def inner(self) -> Stash:
        """Return an empty stash for a layer within a layer: all of this one except its arrays.

        A layer whose inner layers need a stash of their own makes it here and nowhere else, so that
        a pass has the same batch, the same cache and any later additions at every depth.
        """
        made = Stash()
        vars(made).update(vars(self))
        return made


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
