"""Normalization over the model width. Letters: B batch, T tokens, D model width."""

from __future__ import annotations

from mpipar.layers.param import Param


class Norm:
    """Normalizes each token by its own statistics; the parameters are whole on every rank.

    Where the ranks of a group hold different tokens, the parameters' gradients are summed over it.
    A kind of norm gives `fills`, the initial values of its parameters, and its array functions.
    Forward returns y and the statistics that both backward functions take.
    """

    def __init__(self, context, name, d_model, eps=1e-5):
        self.ops, self.name, self.eps = context.ops, name, eps
        self.params = [Param(context, f"{name}.{kind}", (d_model,), fill=fill, decay=False,
                             partial_groups=context.held.partial_groups)
                       for kind, fill in self.fills]
        self._forward, self._backward_input, self._backward_weight = self._functions(self.ops)

    def forward(self, x, stash):
        """y (B, T, D) of x (B, T, D)."""
        y, *statistics = self._forward(x, *(param.data for param in self.params), self.eps)
        stash[self.name, "x"] = x, *statistics
        return y

    def backward_input(self, dy, stash):
        """dx (B, T, D) of dy (B, T, D)."""
        stash[self.name, "dy"] = dy
        x, *statistics = stash[self.name, "x"]
        return self._backward_input(dy, x, self.params[0].data, *statistics)

    def backward_weight(self, stash):
        """Accumulate the gradients of the parameters."""
        kept, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        self._backward_weight(dy, *kept, *(param.grad for param in self.params))


class LayerNorm(Norm):
    """y = (x - mean) / sqrt(var + eps) * w + b."""

    fills = ("w", 1.0), ("b", 0.0)

    def _functions(self, ops):
        return ops.layernorm_forward, ops.layernorm_backward_input, ops.layernorm_backward_weight


class RMSNorm(Norm):
    """y = x / sqrt(mean(x^2) + eps) * w. Source: Zhang and Sennrich 2019, arXiv 1910.07467."""

    fills = (("w", 1.0),)

    def _functions(self, ops):
        return ops.rmsnorm_forward, ops.rmsnorm_backward_input, ops.rmsnorm_backward_weight


NORMS = {"layer": LayerNorm, "rms": RMSNorm}  # --norm
