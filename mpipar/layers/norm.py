"""Normalization over the model width, and the residual connection around what follows it.

Letters: B batch, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpipar.layers.context import Context
from mpipar.layers.param import Param
from mpipar.layers.recompute import run_again
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class Norm:
    """Normalizes each token by its own statistics; the parameters are whole on every rank.

    Where the ranks of a group hold different tokens, the parameters' gradients are summed over it.
    A subclass defines `fills`, the initial values of its parameters, and its array functions. Its
    forward function returns y and the statistics of each token, which both backward functions take.
    """

    fills: tuple[tuple[str, float], ...]
    _functions: Callable[[Any], tuple[Callable[..., Any], ...]]

    def __init__(self, context: Context, name: str, d_model: int, eps: float = 1e-5) -> None:
        self.ops, self.name, self.eps = context.ops, name, eps
        self.params = [
            Param(
                context,
                f"{name}.{kind}",
                (d_model,),
                fill=fill,
                decay=False,
                partial_groups=context.held.partial_groups,
            )
            for kind, fill in self.fills
        ]
        self._forward, self._backward_input, self._backward_weight = self._functions(self.ops)

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, D) of x (B, T, D)."""
        y, *statistics = self._forward(x, *(param.data for param in self.params), self.eps)
        stash[self.name, "x"] = x, *statistics
        return y

    def backward_input(self, dy: Array, stash: Stash, residual: Array | None = None) -> Array:
        """Return dx (B, T, D) of dy (B, T, D), plus residual."""
        stash[self.name, "dy"] = dy
        x, *statistics = stash[self.name, "x"]
        return self._backward_input(dy, x, self.params[0].data, *statistics, residual)

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradients of the parameters."""
        kept, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        self._backward_weight(dy, *kept, *(param.grad for param in self.params))


class LayerNorm(Norm):
    """y = (x - mean) / sqrt(var + eps) * w + b."""

    fills = ("w", 1.0), ("b", 0.0)

    def _functions(self, ops: Any) -> tuple[Callable[..., Any], ...]:
        return (ops.layernorm_forward, ops.layernorm_backward_input, ops.layernorm_backward_weight)


class RMSNorm(Norm):
    """y = x / sqrt(mean(x^2) + eps) * w. Source: Zhang and Sennrich 2019, arXiv 1910.07467."""

    fills = (("w", 1.0),)

    def _functions(self, ops: Any) -> tuple[Callable[..., Any], ...]:
        return ops.rmsnorm_forward, ops.rmsnorm_backward_input, ops.rmsnorm_backward_weight


NORMS: dict[str, type[Norm]] = {"layer": LayerNorm, "rms": RMSNorm}  # --norm


class Residual:
    """y = x + branch(norm(x)); dy flows around the branch and through it.

    norm: a Norm. branch: a layer that keeps the shape of x and adds the `residual` it is given. A
    device computes each of the two sums together with what precedes it. Comm: what the branch
    sends.
    """

    def __init__(self, norm: Norm, branch: Any):
        self.norm, self.branch = norm, branch
        self.params = [*norm.params, *branch.params]

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, D) of x (B, T, D)."""
        return self.branch.forward(self.norm.forward(x, stash), stash, x)

    def recompute(self, x: Array, stash: Stash) -> None:
        """Fill the stash as forward does, without what only y needs."""
        run_again([self.norm, self.branch], x, stash)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, D) of dy (B, T, D)."""
        return self.norm.backward_input(self.branch.backward_input(dy, stash), stash, dy)

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradients of the branch and of the norm."""
        self.branch.backward_weight(stash)
        self.norm.backward_weight(stash)
