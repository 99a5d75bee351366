"""The stash: what forward keeps for backward, one per (stage, microbatch)."""

from __future__ import annotations

from typing import Any


class Stash(dict[tuple[Any, str], Any]):
    """Arrays by (layer name, kind), and the microbatch they belong to, for layers that read it.

    cache: what keeps keys and values while text is generated (see partition/context_cached.py).

    No array in it may alias a buffer that a later receive writes. The engine therefore receives
    every message into a new buffer, which then belongs to the layers.
    """

    def __init__(self, batch: Any = None, cache: Any = None) -> None:
        super().__init__()
        self.batch, self.cache = batch, cache

    def inner(self) -> Stash:
        """Return an empty stash for a layer within a layer: all of this one except its arrays.

        A layer that contains another makes its stash here and nowhere else, so that a pass has the
        same batch, the same cache and any later additions at every depth.
        """
        made = Stash()
        vars(made).update(vars(self))
        return made
