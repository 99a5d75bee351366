"""Causal multi-head attention, cut by heads.

One product with a column cut makes q, k and v of this rank's heads. Each rank attends over its own
heads. The output projection, with a row cut, sums the heads of all ranks. That takes one all-reduce
forward and one backward. Where tokens are cut between the products, x and y are (B, T/tp, D) and
the barriers are those of that pair of cuts. Where the ranks of cp hold other tokens of the same
rows, attention itself crosses barriers: see partition/context.py. Where text is generated, the
stash has a cache of earlier keys and values.

Several heads of queries may share a head of keys and values (grouped-query attention, Ainslie et
al., arXiv 2305.13245). If there are more ranks of tp than heads of keys and values, neighbours hold
replicas of one. Each has the gradient that its own queries make, and their group has the sum.

Letters: B batch, T tokens of this rank's rows, D model width, H heads of queries, K heads of keys
and values, d head width.
"""

from __future__ import annotations

from mpipar.comm.grid import runs
from mpipar.layers.linear import Linear, Part


class Attention:
    """softmax(q k^T / sqrt(d)) v; positions tell which keys a query may see.

    config: a completed DecoderConfig. rotation: turns q and k by their positions.
    """

    def __init__(self, context, name, config, rotation, *, std, out_std):
        self.ops, self.name, self.rotation = context.ops, name, rotation
        self.attention, self.cp = context.attention, context.comms.cp
        tp, self.head_width = context.tp.size, config.head_dim
        heads, kv_heads = config.heads // tp, max(1, config.kv_heads // tp)
        self.parts = runs((heads, kv_heads, kv_heads))  # heads of q, k and v of this rank
        self.turned = slice(0, heads + kv_heads)
        cuts, rows = context.held.cuts, config.rows
        head_shape = config.heads, self.head_width
        if rows == "in":  # one tensor of equal parts
            out_shape, out_axis = (3, *head_shape), 1
        else:
            kv_shape, out_axis = (config.kv_heads, self.head_width), 0
            out_shape = [Part(f"{name}.q", head_shape), Part(f"{name}.k", kv_shape, kv_shape[0]),
                         Part(f"{name}.v", kv_shape, kv_shape[0])]
        self.qkv = Linear(context, f"{name}.qkv", (config.d_model,), out_shape, cut=cuts[0],
                          out_axis=out_axis, std=std, bias=config.bias != "none", rows=rows)
        self.proj = Linear(context, f"{name}.proj", head_shape, (config.d_model,), cut=cuts[1],
                           std=out_std, bias=config.bias == "all", rows=rows)
        self.params = [*self.qkv.params, *self.proj.params]

    def forward(self, x, stash):
        """y (B, T, D) of x (B, T, D). Comm: forward of both cuts, and of attention over cp."""
        qkv = self._by_head(self.qkv.forward(x, stash))
        self.rotation.forward(qkv[:, :, self.turned], stash.batch.positions)
        attention = stash.cache or self.attention
        heads, stash[self.name, "saved"] = attention.forward(
            self.ops, *self._split(qkv), stash.batch, self.cp, self.name)
        return self.proj.forward(heads.reshape(*heads.shape[:2], -1), stash)

    def backward_input(self, dy, stash):
        """dx (B, T, D) of dy (B, T, D).

        Comm: backward_input of both cuts, and of attention over cp.
        """
        saved = stash.pop((self.name, "saved"))
        dheads = self._by_head(self.proj.backward_input(dy, stash))
        dqkv = self.ops.empty(
            (*dheads.shape[:2], self.parts[-1].stop, self.head_width), dheads.dtype)
        self.attention.backward_input(
            self.ops, dheads, saved, stash.batch, self.cp, self.name, self._split(dqkv))
        self.rotation.backward(dqkv[:, :, self.turned], stash.batch.positions)
        return self.qkv.backward_input(dqkv.reshape(*dqkv.shape[:2], -1), stash)

    def backward_weight(self, stash):
        """Accumulate the gradients of both products. Comm: backward_weight of both cuts."""
        self.proj.backward_weight(stash)
        self.qkv.backward_weight(stash)

    def _by_head(self, x):
        """The view (B, T, heads, d) of x (B, T, heads * d)."""
        return x.reshape(*x.shape[:2], -1, self.head_width)

    def _split(self, packed):
        """q (B, T, H/tp, d), k and v of an array of all these heads: views, no copy."""
        return tuple(packed[:, :, part] for part in self.parts)
