"""The base of linear layers: a product that is cut over ranks, and the tokens between two of them.

A subclass is a cut. It holds the product, what is stashed, and the barriers, each a line in its
file. K and N are the product's two widths, q the number of ranks of tp that divide one of them. If
q does not divide it, every shard has the size of the first, and the last ones are padded with
zeros, which change no product.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpipar.layers.param import Param, ParamContext
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array

if TYPE_CHECKING:
    from mpipar.comm.group import Comm
    from mpipar.ops.functions import Ops

Shape = tuple[int, ...]


class Linear(ABC):
    """y = x @ w + b.

    in_shape: logical shape of the inputs, e.g. (D,). out_shape: that of the outputs, e.g. (3, H,
    d). If w consists of several tensors, {name: (shape of its outputs, group that cuts them)};
    their outputs are side by side in y. in_axis, out_axis: the axis of in_shape or out_shape that
    the cut divides, such as heads or channels; axes of out_shape before it count matrices. std:
    standard deviation of the initial weights. bias: whether there is one. rows: which side comes
    first in the weight's logical shape, "in" or "out"; the form on disk decides, since a file
    stores one row after another. For several tensors it is "out": the rows of one then follow those
    of another, and the product reads them as one matrix.
    """

    cuts_outputs: bool  # whether q divides N, else K
    bias_is_cut = False  # elsewhere every rank has all of it

    def __init__(
        self,
        context: ParamContext,
        name: str,
        in_shape: Shape,
        out_shape: Shape | Mapping[str, tuple[Shape, str]],
        *,
        std: float,
        in_axis: int = 0,
        out_axis: int = 0,
        bias: bool = True,
        rows: str = "in",
    ) -> None:
        self.ops, self.name, self.comm = context.ops, name, context.comms["tp"]
        outputs = out_shape if isinstance(out_shape, Mapping) else {name: (out_shape, "tp")}
        in_first = rows == "in" and len(outputs) == 1
        self.weights, self.biases = [], []
        for tensor, (shape, group) in outputs.items():
            axis = out_axis + in_first * len(in_shape)
            if not self.cuts_outputs:
                axis = in_axis + (not in_first) * len(shape)
            whole = (*in_shape, *shape) if in_first else (*shape, *in_shape)
            ins, outs = "i" * len(in_shape), "s" * out_axis + "o" * (len(shape) - out_axis)
            axes = ins + outs if in_first else outs + ins
            self.weights.append(
                Param(context, f"{tensor}.w", whole, placement={group: axis}, std=std, axes=axes)
            )
            if bias:  # a whole one has one owner, which norms and files count: `Param.owner`
                placement = {group: out_axis} if self.bias_is_cut else {}
                self.biases.append(
                    Param(context, f"{tensor}.b", shape, fill=0.0, decay=False, placement=placement)
                )
        self.params = [*self.weights, *self.biases]
        assert len({one.grad_groups for one in self.weights}) == 1, name  # so they are neighbours
        self.in_width, self.out_width = (  # K and N of the whole product
            math.prod(in_shape),
            sum(math.prod(shape) for shape, _ in outputs.values()),
        )
        local, count = self.weights[0].local_shape, len(in_shape)
        rows_here = math.prod(local[:count] if in_first else local[-count:])
        self._in_first, self._in_memory = in_first, (rows_here, -1) if in_first else (-1, rows_here)

    @abstractmethod
    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y of x, and keep x."""

    @abstractmethod
    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx of dy, and keep dy."""

    @abstractmethod
    def backward_weight(self, stash: Stash) -> None:
        """Add to dw and db what x and dy give."""

    # Views of the flat buffers: tensors that are neighbours there are one matrix here.

    @property
    def w(self) -> Array:
        """This rank's shard of the weight, (K, N) with one of both divided by q."""
        return self._matrix("data")

    @property
    def dw(self) -> Array:
        """The gradient of `w`."""
        return self._matrix("grad")

    @property
    def b(self) -> Array | None:
        """The bias (N,) or, where it is cut, (N/q,)."""
        return self._span(self.biases, "data") if self.biases else None

    @property
    def db(self) -> Array | None:
        """The gradient of `b`."""
        return self._span(self.biases, "grad") if self.biases else None

    def _plus_bias(self, y: Array) -> Array:
        """Return y plus the bias that is whole on every rank: once, after the barrier."""
        b = self.b
        return y if b is None else self.ops.bias_forward(y, b)

    def _matrix(self, kind: str) -> Array:
        matrix = self._span(self.weights, kind).reshape(self._in_memory)
        return matrix if self._in_first else matrix.T

    def _span(self, params: list[Param], kind: str) -> Array:
        """Return a view of the flat buffer from the first parameter's numbers to the last one's."""
        first, last = params[0], params[-1]
        # What is not bound is explained, also where ZeRO has taken it away (`unbind`).
        buffer, start = first.bound.get(kind) or first.__getattr__(kind)
        same, place = last.bound[kind]
        assert same is buffer, (first.name, last.name)
        return buffer[start : place + last.size]


class ReplicatedTokens:
    """Every rank of the group holds all tokens.

    partial_groups: the groups over which gradients are partial for parameters that work on held
    tokens.
    """

    partial_groups: tuple[str, ...] = ()

    def __init__(self, ops: Ops, comm: Comm) -> None:
        self.ops, self.comm = ops, comm

    def length(self, tokens: int) -> int:
        """Return how many tokens of T this rank holds."""
        return tokens

    def positions(self, positions: Array) -> Array:
        """Return those of all positions (.., T) that belong to the tokens that this rank holds."""
        return positions

    def gather(self, x: Array, tokens: int, name: str) -> Array:
        """Return all tokens (B, T, D), given those that each rank holds."""
        return x

    def scatter(self, y: Array, name: str) -> Array:
        """Return what this rank holds of the sum of all ranks' y (B, T, D).

        Comm: one all_reduce of y.
        """
        return self.comm.all_reduce(y, name)
