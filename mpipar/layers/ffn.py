"""Feed-forward networks: widen, bend, narrow.

The pair (column, row) cuts the first product by its output channels and the second by its input
channels. So the wide activations never travel: there is one all-reduce forward and one backward.
(gather, gather) cuts both by output channels and collects after each, as textbooks draw a
partitioned layer. Where tokens are cut between the products, x and y are (B, T/tp, D) and the
barriers are those of that pair of cuts. Letters: B batch, T tokens, D model width, F ffn width.
"""

from __future__ import annotations

from mpipar.layers.linear import Linear, Part


class FeedForward:
    """y = gelu(x @ w_up + b_up) @ w_down + b_down.

    cuts: the names of the two products' cuts. bias, rows: see `Linear`.
    """

    def __init__(self, context, name, d_model, ffn, *, cuts, std, out_std, bias=True, rows="in"):
        self.ops, self.name = context.ops, name
        self.up = Linear(context, f"{name}.up", (d_model,), self.wide(ffn), cut=cuts[0], std=std,
                         bias=bias, rows=rows)
        self.down = Linear(context, f"{name}.down", (ffn,), (d_model,), cut=cuts[1], std=out_std,
                           bias=bias, rows=rows)
        self.params = [*self.up.params, *self.down.params]

    def wide(self, ffn):
        """What the first product makes, as `Linear` takes it."""
        return (ffn,)

    def forward(self, x, stash):
        """y (B, T, D) of x (B, T, D). Comm: forward of both cuts."""
        return self.down.forward(self._widen(x, stash), stash)

    def recompute(self, x, stash):
        """Fill the stash as forward does, without the second product. Comm: forward of one cut."""
        self.down.keep(self._widen(x, stash), stash)

    def _widen(self, x, stash):
        """gelu(x @ w_up + b_up). Comm: forward of the first cut."""
        h = self.up.forward_without_bias(x, stash)  # (B, T, F/tp) or, gathered, (B, T, F)
        stash[self.name, "h"] = h
        if not self.up.biases:
            return self.ops.gelu_forward(h)
        return self.ops.bias_gelu_forward(h, self.up.b.data.reshape(-1))  # adds the bias to h

    def backward_input(self, dy, stash):
        """dx (B, T, D) of dy (B, T, D). Comm: backward_input of both cuts."""
        da = self.down.backward_input(dy, stash)
        dh = self.ops.gelu_backward_input(da, stash.pop((self.name, "h")))
        return self.up.backward_input(dh, stash)

    def backward_weight(self, stash):
        """Accumulate the gradients of both products. Comm: backward_weight of both cuts."""
        self.down.backward_weight(stash)
        self.up.backward_weight(stash)


class GatedFeedForward(FeedForward):
    """y = (silu(x @ w_gate) * (x @ w_up)) @ w_down, and biases: SwiGLU, arXiv 2002.05202.

    One product makes gate and up, each rank's part of both. Only they are kept from forward to
    backward. What the second product reads is made again with the gradients.
    """

    def wide(self, ffn):
        """Gate and up side by side, as `Linear` takes them."""
        return [Part(f"{self.name}.gate", (ffn,)), Part(f"{self.name}.up", (ffn,))]

    def forward(self, x, stash):
        """y (B, T, D) of x (B, T, D). Comm: forward of both cuts."""
        y = self.down.forward(self._widen(x, stash), stash)
        self.down.keep_no_longer(stash)
        return y

    def recompute(self, x, stash):
        """Fill the stash as forward does, without the second product. Comm: forward of one cut."""
        stash[self.name, "h"] = self._gate_and_up(x, stash)

    def _widen(self, x, stash):
        """silu(gate) * up (B, T, F/tp). Comm: forward of the first cut."""
        h = stash[self.name, "h"] = self._gate_and_up(x, stash)
        return self.ops.swiglu_forward(h)

    def _gate_and_up(self, x, stash):
        """(B, T, 2, F/tp). Comm: forward of the first cut."""
        h = self.up.forward(x, stash)
        return h.reshape(*h.shape[:-1], 2, -1)

    def backward_input(self, dy, stash):
        """dx (B, T, D) of dy (B, T, D). Comm: backward_input of both cuts."""
        da = self.down.backward_input(dy, stash)
        dh, a = self.ops.swiglu_backward_input(da, stash.pop((self.name, "h")))
        self.down.keep(a, stash)
        return self.up.backward_input(dh.reshape(*dh.shape[:-2], -1), stash)


FFNS = {"gelu": FeedForward, "swiglu": GatedFeedForward}  # --activation
