"""Causal multi-head attention, cut by heads.

One product with a column cut computes q, k and v of this rank's heads, over which each rank attends
on its own. The output projection, with a row cut, sums the heads of all ranks, which takes one
all-reduce forward and one backward. Where tokens are cut between the products, x and y are (B,
T/tp, D) and the barriers are those of that pair of cuts. Where the ranks of cp hold different
tokens of the same rows, attention itself crosses barriers: see parallel/local_attention.py. During
text generation, the stash has a cache of earlier keys and values.

Several query heads may share one head of keys and values (grouped-query attention, Ainslie et al.,
arXiv 2305.13245). If tp has more ranks than there are key and value heads, neighbours hold replicas
of one: the group kv. Each of them has the gradient of keys and values from its own queries only,
while the weights need the sum over the group.

Letters: B batch, T tokens of this rank's rows, D model width, H heads of queries, K heads of keys
and values, d head width.
"""

from __future__ import annotations

from mpipar.comm.grid import consecutive_slices
from mpipar.layers.context import Context
from mpipar.layers.parallel.linear import Linear
from mpipar.layers.rotation import Rotation
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class Attention:
    """softmax(q k^T / sqrt(d)) v, where positions determine which keys a query may see.

    qkv, proj: the two products, e.g. a ColumnLinear and a RowLinear. heads, kv_heads: of all ranks.
    rotation: rotates q and k by their positions; None if the embedding has already added these.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        qkv: Linear,
        proj: Linear,
        *,
        heads: int,
        kv_heads: int,
        head_width: int,
        rotation: Rotation | None,
    ) -> None:
        self.ops, self.name, self.rotation = context.ops, name, rotation
        self.qkv, self.proj, self.head_width = qkv, proj, head_width
        self.attention = context.attention(context.ops, context.comms["cp"], name)
        self.kv, tp = context.comms["kv"], context.tp.size
        own, shared = heads // tp, max(1, kv_heads // tp)  # heads of queries, and of keys, here
        self.parts = consecutive_slices((own, shared, shared))  # of q, k and v
        self.turned, self.shared = slice(0, own + shared), slice(own, None)
        self.params = [*qkv.params, *proj.params]

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, D) of x (B, T, D).

        Comm: one all_reduce of y over tp, by `proj`; keys and values over cp, by `attention`.
        """
        qkv = self._by_head(self.qkv.forward(x, stash))  # (B, T, (H + 2K)/tp, d)
        if self.rotation:
            self.rotation.forward(qkv[:, :, self.turned], stash.batch.positions)
        if stash.cache is not None:
            y = stash.cache.forward(self.ops, self.name, *self._split(qkv))
        else:
            y, saved = self.attention.forward(*self._split(qkv), stash.batch)
            stash[self.name, "saved"] = saved
        return self.proj.forward(y.reshape(*y.shape[:2], -1), stash)  # of y (B, T, H/tp d)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, D) of dy (B, T, D).

        Comm: one all_reduce of dx over tp, by `qkv`; keys and values over cp, by `attention`.
        """
        saved = stash.pop((self.name, "saved"))
        dy = self._by_head(self.proj.backward_input(dy, stash))  # (B, T, H/tp, d)
        dqkv = self.ops.empty((*dy.shape[:2], self.parts[-1].stop, self.head_width), dy.dtype)
        self.attention.backward_input(dy, saved, stash.batch, self._split(dqkv))
        if self.rotation:
            self.rotation.backward(dqkv[:, :, self.turned], stash.batch.positions)
        stash[self.name, "dkv"] = dqkv[:, :, self.shared]
        return self.qkv.backward_input(dqkv.reshape(*dqkv.shape[:2], -1), stash)

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradients of both products.

        Comm: one all_reduce of dk and dv over kv, the ranks that share these heads.
        """
        self.proj.backward_weight(stash)
        dkv = stash.pop((self.name, "dkv"))  # a view with gaps, which qkv reads as a part of its dy
        if self.kv.size > 1:
            # Not earlier: dx is summed over all of tp, so each part must count once there.
            whole = self.ops.empty(dkv.shape, dkv.dtype, label="buffers")
            self.ops.copy(whole, dkv)
            self.ops.copy(dkv, self.kv.all_reduce(whole, f"{self.name}.kv"))
            del whole
        self.qkv.backward_weight(stash)

    def _by_head(self, x: Array) -> Array:
        """Return the view (B, T, heads, d) of x (B, T, heads * d)."""
        return x.reshape(*x.shape[:2], -1, self.head_width)

    def _split(self, packed: Array) -> tuple[Array, Array, Array]:
        """Return q (B, T, H/tp, d), k and v of an array of all these heads: views, no copies."""
        q, k, v = self.parts
        return packed[:, :, q], packed[:, :, k], packed[:, :, v]
