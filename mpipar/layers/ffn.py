"""Feed-forward networks: up-projection, activation, down-projection.

The pair (column, row) cuts the first product by its output channels and the second by its input
channels, so the wide activations never travel: there is one all-reduce forward and one backward.
(gather, gather) cuts both by output channels and gathers after each, as textbooks draw a
partitioned layer. Where tokens are cut between the products, x and y are (B, T/tp, D) and the
barriers are those of that pair of cuts. Letters: B batch, T tokens, D model width, F ffn width.
"""

from __future__ import annotations

from mpipar.layers.context import Context
from mpipar.layers.linear import Linear
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class FeedForward:
    """y = gelu(x @ w_up + b_up) @ w_down + b_down.

    cuts: the names of the two products' cuts. bias, rows: see `Linear`.
    """

    tensors: tuple[str, ...] = ("up",)  # the weights of the first product

    def __init__(
        self,
        context: Context,
        name: str,
        d_model: int,
        ffn: int,
        *,
        cuts: tuple[str, str],
        std: float,
        out_std: float,
        bias: bool = True,
        rows: str = "in",
    ) -> None:
        self.ops, self.name = context.ops, name
        wide = {f"{name}.{tensor}": ((ffn,), "tp") for tensor in self.tensors}
        self.up = Linear(
            context, f"{name}.up", (d_model,), wide, cut=cuts[0], std=std, bias=bias, rows=rows
        )
        self.down = Linear(
            context,
            f"{name}.down",
            (ffn,),
            (d_model,),
            cut=cuts[1],
            std=out_std,
            bias=bias,
            rows=rows,
        )
        self.params = [*self.up.params, *self.down.params]

    def forward(self, x: Array, stash: Stash, residual: Array | None = None) -> Array:
        """Return y (B, T, D) of x (B, T, D), plus residual. Comm: forward of both cuts."""
        return self.down.forward(self._widen(x, stash), stash, residual)

    def recompute(self, x: Array, stash: Stash) -> None:
        """Fill the stash as forward does, without the second product. Comm: forward of one cut."""
        self.down.keep(self._widen(x, stash), stash)

    def _widen(self, x: Array, stash: Stash) -> Array:
        """Return gelu(x @ w_up + b_up). Comm: forward of the first cut."""
        a, h = self.up.forward_gelu(x, stash)  # (B, T, F/tp) or, gathered, (B, T, F)
        stash[self.name, "h"] = h
        return a

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, D) of dy (B, T, D). Comm: backward_input of both cuts."""
        dh = self.down.backward_input_gelu(dy, stash.pop((self.name, "h")), stash)
        return self.up.backward_input(dh, stash)

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradients of both products. Comm: backward_weight of both cuts."""
        self.down.backward_weight(stash)
        self.up.backward_weight(stash)


class GatedFeedForward(FeedForward):
    """y = (silu(x @ w_gate) * (x @ w_up)) @ w_down, and biases: SwiGLU, arXiv 2002.05202.

    One product computes gate and up, each rank's part of both. Only they are kept from forward to
    backward; what the second product reads is recomputed together with the gradients.
    """

    tensors = ("gate", "up")

    def forward(self, x: Array, stash: Stash, residual: Array | None = None) -> Array:
        """Return y (B, T, D) of x (B, T, D), plus residual. Comm: forward of both cuts."""
        y = self.down.forward(self._widen(x, stash), stash, residual)
        self.down.keep_no_longer(stash)
        return y

    def recompute(self, x: Array, stash: Stash) -> None:
        """Fill the stash as forward does, without the second product. Comm: forward of one cut."""
        stash[self.name, "h"] = self._gate_and_up(x, stash)

    def _widen(self, x: Array, stash: Stash) -> Array:
        """Return silu(gate) * up (B, T, F/tp). Comm: forward of the first cut."""
        h = stash[self.name, "h"] = self._gate_and_up(x, stash)
        return self.ops.swiglu_forward(h)

    def _gate_and_up(self, x: Array, stash: Stash) -> Array:
        """Return gate and up (B, T, 2, F/tp). Comm: forward of the first cut."""
        h = self.up.forward(x, stash)
        return h.reshape(*h.shape[:-1], 2, -1)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, D) of dy (B, T, D). Comm: backward_input of both cuts."""
        da = self.down.backward_input(dy, stash)
        dh, a = self.ops.swiglu_backward_input(da, stash.pop((self.name, "h")))
        self.down.keep(a, stash)
        return self.up.backward_input(dh.reshape(*dh.shape[:-2], -1), stash)


# --activation
FFNS: dict[str, type[FeedForward]] = {"gelu": FeedForward, "swiglu": GatedFeedForward}
