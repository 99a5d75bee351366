"""The stash: what forward keeps for backward, one per (stage, microbatch)."""

from __future__ import annotations


class Stash(dict):
    """Arrays by (layer name, what it is), and the microbatch they belong to, if a layer reads it.

    Nothing in it may alias a buffer that a later receive writes: the engine receives every message
    into a buffer of its own and gives that buffer away.
    """

    def __init__(self, batch=None):
        super().__init__()
        self.batch = batch
