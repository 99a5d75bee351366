"""Feed-forward networks: up-projection, activation, down-projection.

The pair (column, row) cuts the first product by its output channels and the second by its input
channels, so the wide activations never travel: there is one all-reduce forward and one backward.
(gather, gather) cuts both by output channels and gathers after each, as textbooks draw it; (reduce,
reduce) cuts both by input channels. Where tokens are cut between the products, x and y are (B,
T/tp, D) and the barriers those of that pair. `models.decoder.feed_forward` chooses; `Comm:` lines
are those of (column, row). Letters: B batch, T tokens, D model width, F ffn width.
"""

from __future__ import annotations

from mpipar.layers.parallel.linear import Linear
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class FeedForward:
    """y = gelu(x @ w_up + b_up) @ w_down + b_down.

    up, down: the two products, e.g. a ColumnLinear and a RowLinear.
    """

    tensors: tuple[str, ...] = ("up",)  # the weights of the first product

    def __init__(self, name: str, up: Linear, down: Linear) -> None:
        self.ops, self.name, self.up, self.down = up.ops, name, up, down
        self.params = [*up.params, *down.params]

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, D) of x (B, T, D). Comm: one all_reduce of y over tp, by `down`."""
        h = self.up.forward(x, stash)  # (B, T, F/tp) or, gathered, (B, T, F)
        stash[self.name, "h"] = h
        return self.down.forward(self.ops.gelu_forward(h), stash)

    def recompute(self, x: Array, stash: Stash) -> None:
        """Fill the stash as forward does, without the second product and its barrier."""
        h = self.up.forward(x, stash)
        stash[self.name, "h"] = h
        stash[self.down.name, "x"] = self.ops.gelu_forward(h)  # as `down` would

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, D) of dy (B, T, D). Comm: one all_reduce of dx over tp, by `up`."""
        da = self.down.backward_input(dy, stash)  # (B, T, F/tp)
        dh = self.ops.gelu_backward_input(da, stash.pop((self.name, "h")))
        return self.up.backward_input(dh, stash)

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradients of both products."""
        self.down.backward_weight(stash)
        self.up.backward_weight(stash)


class GatedFeedForward(FeedForward):
    """y = (silu(x @ w_gate) * (x @ w_up)) @ w_down, and biases: SwiGLU, arXiv 2002.05202.

    One product computes gate and up, each rank's part of both. Only they are kept from forward to
    backward; what the second product reads is recomputed together with the gradients.
    """

    tensors = ("gate", "up")

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, D) of x (B, T, D). Comm: one all_reduce of y over tp, by `down`."""
        self.recompute(x, stash)
        y = self.down.forward(self.ops.swiglu_forward(stash[self.name, "h"]), stash)
        del stash[self.down.name, "x"]  # backward_input recomputes it
        return y

    def recompute(self, x: Array, stash: Stash) -> None:
        """Fill the stash as forward does, without the second product and its barrier."""
        h = self.up.forward(x, stash)
        stash[self.name, "h"] = h.reshape(*h.shape[:-1], 2, -1)  # (B, T, 2, F/tp): gate and up

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, D) of dy (B, T, D). Comm: one all_reduce of dx over tp, by `up`."""
        da = self.down.backward_input(dy, stash)
        dh, a = self.ops.swiglu_backward_input(da, stash.pop((self.name, "h")))
        stash[self.down.name, "x"] = a
        return self.up.backward_input(dh.reshape(*dh.shape[:-2], -1), stash)


# --activation
FFNS: dict[str, type[FeedForward]] = {"gelu": FeedForward, "swiglu": GatedFeedForward}
