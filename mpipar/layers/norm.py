"""Normalization over the model width, and the residual connection around what follows it.

Letters: B batch, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from mpipar.layers.context import Context
from mpipar.layers.param import Param
from mpipar.layers.recompute import recompute
from mpipar.layers.stash import Layer, Stash
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array

# forward, which returns y and statistics, backward_input and backward_weight
Functions: TypeAlias = tuple[
    Callable[..., tuple[Array, ...]], Callable[..., Array], Callable[..., None]
]


class Norm:
    """Normalizes each token by its own statistics; the parameters are whole on every rank.

    Where the ranks of a group hold different tokens, the parameters' gradients are summed over it.
    A subclass defines `fills`, the initial values of its parameters, and its array functions. Its
    forward function returns y and the statistics of each token, which both backward functions take.
    """

    fills: tuple[tuple[str, float], ...]
    _functions: Callable[[Ops], Functions]

    def __init__(self, context: Context, name: str, d_model: int, eps: float = 1e-5) -> None:
        self.ops, self.name, self.eps = context.ops, name, eps
        self.params = [
            Param(
                context,
                f"{name}.{kind}",
                (d_model,),
                fill=fill,
                decay=False,
                partial_groups=context.token_layout.partial_groups,
            )
            for kind, fill in self.fills
        ]
        self._forward, self._backward_input, self._backward_weight = self._functions(self.ops)

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, D) of x (B, T, D)."""
        y, *statistics = self._forward(x, *(param.data for param in self.params), self.eps)
        stash[self.name, "x"] = x, *statistics
        return y

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, D) of dy (B, T, D)."""
        return self.backward_beside(dy, None, stash)

    def backward_beside(self, dy: Array, around: Array | None, stash: Stash) -> Array:
        """Return dx (B, T, D) of dy, plus the gradient of x that flows around the norm, if any."""
        stash[self.name, "dy"] = dy
        x, *statistics = stash[self.name, "x"]
        return self._backward_input(dy, x, self.params[0].data, *statistics, around)

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradients of the parameters."""
        kept, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        self._backward_weight(dy, *kept, *(param.grad for param in self.params))


class LayerNorm(Norm):
    """y = (x - mean) / sqrt(var + eps) * w + b."""

    fills = ("w", 1.0), ("b", 0.0)

    def _functions(self, ops: Ops) -> Functions:
        return (ops.layernorm_forward, ops.layernorm_backward_input, ops.layernorm_backward_weight)


class RMSNorm(Norm):
    """y = x / sqrt(mean(x^2) + eps) * w. Source: Zhang and Sennrich 2019, arXiv 1910.07467."""

    fills = (("w", 1.0),)

    def _functions(self, ops: Ops) -> Functions:
        return ops.rmsnorm_forward, ops.rmsnorm_backward_input, ops.rmsnorm_backward_weight


NORMS: dict[str, type[Norm]] = {"layer": LayerNorm, "rms": RMSNorm}  # --norm


class Residual:
    """y = x + the sum of all branch(norm(x)); dy flows around the branches and through them.

    branches: layers that keep the shape of x. Comm: what the branches send.
    """

    def __init__(self, norm: Norm, *branches: Layer) -> None:
        self.ops, self.norm, self.branches = norm.ops, norm, branches
        self.params = [param for one in (norm, *branches) for param in one.params]

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, D) of x (B, T, D)."""
        h = self.norm.forward(x, stash)
        for branch in self.branches:
            x = self.ops.accumulate(branch.forward(h, stash), x)
        return x

    def recompute(self, x: Array, stash: Stash) -> None:
        """Fill the stash as forward does, without what only y needs."""
        h = self.norm.forward(x, stash)
        for branch in self.branches:
            recompute(branch, h, stash)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, D) of dy (B, T, D)."""
        *others, last = self.branches
        dh = last.backward_input(dy, stash)
        for branch in reversed(others):
            dh = self.ops.accumulate(dh, branch.backward_input(dy, stash))
        return self.norm.backward_beside(dh, dy, stash)

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradients of the branches and of the norm."""
        for branch in reversed(self.branches):
            branch.backward_weight(stash)
        self.norm.backward_weight(stash)
