"""The stash: what forward keeps for backward, one per (stage, microbatch)."""

from __future__ import annotations


class Stash(dict):
    """Arrays by (layer name, kind), and the microbatch they belong to, for layers that read it.

    cache: what keeps keys and values while text is generated (see partition/context_cached.py).

    No array in it may alias a buffer that a later receive writes. So the engine receives every
    message into a new buffer, which then belongs to the layers.
    """

    def __init__(self, batch=None, cache=None):
        super().__init__()
        self.batch, self.cache = batch, cache
