"""Feed-forward network: widen, GELU, narrow.

The pair (column, row) cuts the first product by its output channels and the second by its input
channels. So the wide activations never travel: there is one all-reduce forward and one backward.
(gather, gather) cuts both by output channels and collects after each, as textbooks draw a
partitioned layer. Where tokens are cut between the products, x and y are (B, T/tp, D) and the
barriers are those of that pair of cuts. Letters: B batch, T tokens, D model width, F ffn width.
"""

from __future__ import annotations

from mpipar.layers.linear import Linear


class FeedForward:
    """y = gelu(x @ w_up + b_up) @ w_down + b_down. cuts: the names of the two products' cuts."""

    def __init__(self, context, name, d_model, ffn, *, cuts, std, out_std):
        self.ops, self.name = context.ops, name
        self.up = Linear(context, f"{name}.up", (d_model,), (ffn,), cut=cuts[0], std=std)
        self.down = Linear(context, f"{name}.down", (ffn,), (d_model,), cut=cuts[1], std=out_std)
        self.params = [*self.up.params, *self.down.params]

    def forward(self, x, stash):
        """y (B, T, D) of x (B, T, D). Comm: forward of both cuts."""
        return self.down.forward(self._widen(x, stash), stash)

    def recompute(self, x, stash):
        """Fill the stash as forward does, without the second product. Comm: forward of one cut."""
        self.down.keep(self._widen(x, stash), stash)

    def _widen(self, x, stash):
        """gelu(x @ w_up + b_up). Comm: forward of the first cut."""
        h = self.up.forward_without_bias(x, stash)  # (B, T, F/tp) or, gathered, (B, T, F)
        y = self.ops.bias_gelu_forward(h, self.up.b.data.reshape(-1))  # adds the bias to h
        stash[self.name, "h"] = h
        return y

    def backward_input(self, dy, stash):
        """dx (B, T, D) of dy (B, T, D). Comm: backward_input of both cuts."""
        da = self.down.backward_input(dy, stash)
        dh = self.ops.gelu_backward_input(da, stash.pop((self.name, "h")))
        return self.up.backward_input(dh, stash)

    def backward_weight(self, stash):
        """Accumulate the gradients of both products. Comm: backward_weight of both cuts."""
        self.down.backward_weight(stash)
        self.up.backward_weight(stash)
