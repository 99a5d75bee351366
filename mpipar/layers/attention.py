"""Causal multi-head attention, cut by heads.

One fused product with a column cut makes q, k and v of this rank's heads. Each rank attends over
its own heads. The output projection, with a row cut, sums the heads of all ranks. That takes one
all-reduce forward and one backward. Where tokens are cut between the products, x and y are (B,
T/tp, D) and the barriers are those of that pair of cuts. Where the ranks of cp hold other tokens of
the same rows, attention itself crosses barriers: see partition/context.py. Letters: B batch, T
tokens of this rank's rows, D model width, H heads, d head width.
"""

from __future__ import annotations

from mpipar.layers.linear import Linear


class Attention:
    """softmax(q k^T / sqrt(d)) v; positions tell which keys a query may see."""

    def __init__(self, context, name, d_model, heads, *, std, out_std):
        self.ops, self.name = context.ops, name
        self.attention, self.cp = context.attention, context.comms.cp
        self.local_heads, self.head_width = heads // context.tp.size, d_model // heads
        head_shape = (heads, self.head_width)
        cuts = context.held.cuts
        self.qkv = Linear(context, f"{name}.qkv", (d_model,), (3, *head_shape), cut=cuts[0],
                          out_axis=1, std=std)
        self.proj = Linear(
            context, f"{name}.proj", head_shape, (d_model,), cut=cuts[1], std=out_std)
        self.params = [*self.qkv.params, *self.proj.params]

    def forward(self, x, stash):
        """y (B, T, D) of x (B, T, D). Comm: forward of both cuts, and of attention over cp."""
        qkv = self.qkv.forward(x, stash)  # (B, T, 3 * H/tp * d)
        qkv = qkv.reshape(*qkv.shape[:2], 3, self.local_heads, self.head_width)
        heads, stash[self.name, "saved"] = self.attention.forward(
            self.ops, *_parts(qkv), stash.batch, self.cp, self.name)
        return self.proj.forward(heads.reshape(*heads.shape[:2], -1), stash)

    def backward_input(self, dy, stash):
        """dx (B, T, D) of dy (B, T, D).

        Comm: backward_input of both cuts, and of attention over cp.
        """
        saved = stash.pop((self.name, "saved"))
        dheads = self.proj.backward_input(dy, stash)  # (B, T, H/tp * d)
        dheads = dheads.reshape(*dheads.shape[:2], self.local_heads, self.head_width)
        dqkv = self.ops.empty(
            (*dheads.shape[:2], 3, self.local_heads, self.head_width), dheads.dtype)
        self.attention.backward_input(
            self.ops, dheads, saved, stash.batch, self.cp, self.name, _parts(dqkv))
        return self.qkv.backward_input(dqkv.reshape(*dqkv.shape[:2], -1), stash)

    def backward_weight(self, stash):
        """Accumulate the gradients of both products. Comm: backward_weight of both cuts."""
        self.proj.backward_weight(stash)
        self.qkv.backward_weight(stash)


def _parts(packed):
    """The three views (B, T, H, d) of a packed (B, T, 3, H, d) array, without a copy."""
    return tuple(packed[:, :, i] for i in range(3))
