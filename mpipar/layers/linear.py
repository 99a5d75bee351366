"""Linear layer: a product cut over ranks (see mpipar/partition) and its bias.

Letters: B batch, T tokens, D model width; K and N stand for the product's two widths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mpipar.layers.context import Context
from mpipar.layers.param import Param
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array
from mpipar.partition import CUTS, Sizes
from mpipar.partition.contracts import Here

Shape = tuple[int, ...]


class Linear:
    """y = x @ w + b.

    in_shape: logical shape of the inputs, e.g. (D,). out_shape: that of the outputs, e.g. (3, H,
    d). If w consists of several tensors, {name: (shape of its outputs, group that cuts them)};
    their outputs are side by side in y. cut: a name of `partition.CUTS`, which divides the inputs
    or the outputs. in_axis, out_axis: the axis of in_shape or out_shape that the cut divides, such
    as heads or channels. std: standard deviation of the initial weights. bias: whether there is
    one. rows: which side comes first in the weight's logical shape, "in" or "out"; the form on disk
    decides, since a file stores one row after another. For several tensors it is "out": the rows of
    one then follow those of another, and the product reads them as one matrix.

    A column cut divides the bias with the outputs. For the other cuts the bias is whole on every
    rank and added once, after the barrier; added before a row cut's sum, it would count once per
    rank.

    w, b: the first tensor of the weights, and of the bias or None.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        in_shape: Shape,
        out_shape: Shape | Mapping[str, tuple[Shape, str]],
        *,
        cut: str,
        std: float,
        in_axis: int = 0,
        out_axis: int = 0,
        bias: bool = True,
        rows: str = "in",
    ) -> None:
        self.ops, self.name, self.comm = context.ops, name, context.tp
        self.cut = CUTS[cut]
        outputs = out_shape if isinstance(out_shape, Mapping) else {name: (out_shape, "tp")}
        in_first = rows == "in" and len(outputs) == 1
        weights, biases = [], []
        for tensor, (shape, group) in outputs.items():
            axes = (
                in_axis + (0 if in_first else len(shape)),
                out_axis + (len(in_shape) if in_first else 0),
            )
            weights.append(
                Param(
                    context,
                    f"{tensor}.w",
                    (*in_shape, *shape) if in_first else (*shape, *in_shape),
                    placement={group: axes[self.cut.shard_axis]},
                    std=std,
                )
            )
            if bias:
                biases.append(
                    Param(
                        context,
                        f"{tensor}.b",
                        shape,
                        fill=0.0,
                        decay=False,
                        placement={group: out_axis} if self.cut.bias_is_cut else {},
                    )
                )
        self.params = [*weights, *biases]
        assert len({one.grad_groups for one in weights}) == 1, name  # so they are side by side
        self.w, self.b = weights[0], biases[0] if biases else None
        self.weights, self.biases = weights, biases
        self.w_size = sum(one.size for one in weights)
        local, count = self.w.local_shape, len(in_shape)
        inner = math.prod(local[:count] if in_first else local[-count:])
        self.in_first, self.in_memory = in_first, (inner, -1) if in_first else (-1, inner)
        self.sizes = Sizes(
            0, math.prod(in_shape), sum(math.prod(shape) for shape, _ in outputs.values())
        )

    @property
    def alone(self) -> bool:
        """Whether no barrier comes between the matrix product and what follows it.

        A device may then compute both in one function.
        """
        return self.comm.size == 1

    def matrix(self, kind: str) -> Array:
        """Return the weights, or their gradients, as one matrix (K, N): a view."""
        w = self.w.through(self.weights[-1], kind)
        assert w.size == self.w_size, (self.name, w.size, self.w_size)
        w = w.reshape(self.in_memory)
        return w if self.in_first else w.T

    def bias(self, kind: str) -> Array:
        """Return the bias, or its gradient, (N,): a view; None if there is none."""
        return self.b.through(self.biases[-1], kind) if self.b else None

    def _here(self, stash: Stash) -> Here:
        """Return what the cut works with; sizes have a number of tokens if the cut divides them."""
        sizes = self.sizes
        if self.cut.tokens_are_cut:
            sizes = sizes._replace(tokens=stash.batch.shape[1])
        return Here(self.ops, self.comm, self.name, sizes)

    def forward(self, x: Array, stash: Stash, residual: Array | None = None) -> Array:
        """Return y (.., N) of x (.., K), with local sizes as the cut leaves them.

        residual (.., N): added to y, if given. Comm: forward of the cut.
        """
        if self.b and self.alone:
            self.keep(x, stash)
            return self.ops.matmul_bias(x, self.matrix("data"), self.bias("data"), residual)
        y, b = self.forward_without_bias(x, stash), self.bias("data")
        if b is not None:
            return self.ops.bias_forward(y, b, residual)
        return y if residual is None else self.ops.accumulate(y, residual)

    def forward_without_bias(self, x: Array, stash: Stash) -> Array:
        """Return y (.., N) of x (.., K), without the bias. Comm: forward of the cut."""
        self.keep(x, stash)
        return self.cut.forward(self._here(stash), x, self.matrix("data"))

    def forward_gelu(self, x: Array, stash: Stash) -> tuple[Array, Array]:
        """Return (GELU of h, h (.., N) of x (.., K)). Comm: forward of the cut."""
        if self.b and self.alone:
            self.keep(x, stash)
            a, h = self.ops.matmul_bias_gelu(x, self.matrix("data"), self.bias("data"))
            return a, h
        h, b = self.forward_without_bias(x, stash), self.bias("data")
        if b is None:
            return self.ops.gelu_forward(h), h
        return self.ops.bias_gelu_forward(h, b), h  # adds the bias to h

    def keep(self, x: Array, stash: Stash) -> None:
        """Keep x for the weight gradient."""
        stash[self.name, "x"] = x

    def keep_no_longer(self, stash: Stash) -> None:
        """Drop what forward has kept; the caller passes it to `keep` again before backward."""
        del stash[self.name, "x"]

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (.., K) of dy (.., N). Comm: backward_input of the cut."""
        dx, stash[self.name, "dy"] = self.cut.backward_input(
            self._here(stash), dy, self.matrix("data")
        )
        return dx

    def backward_input_gelu(self, dy: Array, h: Array, stash: Stash) -> Array:
        """Return dh (.., K) of dy (.., N), where x = GELU(h). Comm: backward_input of the cut."""
        if self.alone:
            stash[self.name, "dy"] = dy
            return self.ops.matmul_nt_gelu_backward(dy, self.matrix("data"), h)
        return self.ops.gelu_backward_input(self.backward_input(dy, stash), h)

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradients of w and b. Comm: backward_weight of the cut."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        dw, db = self.matrix("grad"), self.bias("grad")
        if self.b and self.alone:
            self.ops.matmul_tn_add_sums(x, dy, dw, db, self.b.fresh)
            self.b.fresh = False
            return
        self.cut.backward_weight(self._here(stash), x, dy, dw)
        if db is not None:
            self.ops.bias_backward_weight(dy, db)
