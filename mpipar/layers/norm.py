"""Layer normalization over the model width. Letters: B batch, T tokens, D model width."""

from __future__ import annotations

from mpipar.layers.param import Param


class LayerNorm:
    """y = (x - mean) / sqrt(var + eps) * w + b, per token; w and b whole on every rank.

    partial_groups: groups whose ranks hold different tokens, so that w's and b's gradients are sums
    over them.
    """

    def __init__(self, ops, name, d_model, comm, partial_groups=(), eps=1e-5):
        self.ops, self.name, self.eps = ops, name, eps
        self.w = Param(f"{name}.w", (d_model,), comm, fill=1.0, decay=False)
        self.b = Param(f"{name}.b", (d_model,), comm, fill=0.0, decay=False)
        self.params = [self.w, self.b]
        for param in self.params:
            param.grad_groups = partial_groups

    def forward(self, x, stash):
        """y (B, T, D) of x (B, T, D). Comm: none."""
        y, mean, rstd = self.ops.layernorm_forward(x, self.w.data, self.b.data, self.eps)
        stash[self.name, "x"] = x, mean, rstd
        return y

    def backward_input(self, dy, stash):
        """dx (B, T, D) of dy (B, T, D). Comm: none."""
        stash[self.name, "dy"] = dy
        x, mean, rstd = stash[self.name, "x"]
        return self.ops.layernorm_backward_input(dy, x, self.w.data, mean, rstd)

    def backward_weight(self, stash):
        """Accumulate the gradients of w and b. Comm: none."""
        (x, mean, rstd), dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        self.ops.layernorm_backward_weight(dy, x, mean, rstd, self.w.grad, self.b.grad)
