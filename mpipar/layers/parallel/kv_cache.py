"""Attention of new tokens to all tokens before them, whose keys and values are kept: a KV cache.

A text grows by one token at a time while the keys and values of its older tokens never change, so
they are computed only once. There is no backward pass. A rank keeps the keys and values of its own
heads and layers, so the cache is sharded over tp and pp as the model is.

The rows of a group of prompts end at the same slot, that of the newest token. A shorter prompt
begins at a later slot, and the slots before it are padding that no query sees, because a row's
attention begins at its first slot. Letters: B rows, T new tokens, S slots, Hkv key heads of this
rank, d head width.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpipar.layers.parallel.chunks import rounded
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array


class KVCache:
    """Keys and values of a group of prompts in one stage, by the name of the attention layer.

    firsts: the slot of each row's first token. slots: the numbers of all slots (S,), on the device.
    new: the slots of the tokens that the next forward pass reads; set it before that pass.
    """

    def __init__(self, firsts: Iterable[int], slots: Array, new: slice = slice(0)) -> None:
        self.firsts, self.slots, self.new = tuple(firsts), slots, new
        self.kept: dict[str, tuple[Array, Array]] = {}

    def forward(self, ops: Ops, name: str, q: Array, k: Array, v: Array) -> Array:
        """Return y (B, T, H, d) of q (B, T, H, d), k and v (B, T, Hkv, d); keep k and v.

        name: of the attention layer.
        """
        if name not in self.kept:
            batch, _, *head = k.shape
            shape = (batch, self.slots.shape[0], *head)
            self.kept[name] = ops.empty(shape, k.dtype, "cache"), ops.empty(shape, k.dtype, "cache")
        keys, values = self.kept[name]  # (B, S, Hkv, d)
        ops.copy(keys[:, self.new], k)
        ops.copy(values[:, self.new], v)
        queries, end = self.slots[self.new], self.new.stop
        if not any(self.firsts):
            y, _ = ops.attention_block_forward(
                q, keys[:, :end], values[:, :end], queries, self.slots[:end]
            )
            return rounded(ops, y, q.dtype)
        y = ops.empty(q.shape, q.dtype)
        for row, first in enumerate(self.firsts):
            seen = slice(first, end)
            part, _ = ops.attention_block_forward(
                q[row : row + 1],
                keys[row : row + 1, seen],
                values[row : row + 1, seen],
                queries,
                self.slots[seen],
            )
            ops.copy(y[row : row + 1], part)
        return y
