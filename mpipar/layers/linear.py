"""Linear layer: a product cut over ranks (see mpipar/partition) and its bias.

Letters: B batch, T tokens, D model width; K and N stand for the product's two widths.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mpipar.comm.grid import runs
from mpipar.layers.param import Param, joined
from mpipar.partition import CUTS, Sizes


class Part(NamedTuple):
    """Some of the outputs of a product, with a weight and a bias of their own.

    name: of the parameters, before `.w` and `.b`. shape: logical shape of the outputs. pieces: into
    how many pieces at most a cut divides them, see `Param`.
    """

    name: str
    shape: tuple[int, ...]
    pieces: int | None = None


class Linear:
    """y = x @ w + b.

    in_shape: logical shape of the inputs, e.g. (D,). out_shape: that of the outputs, e.g. (3, H,
    d), or a list of Parts, whose outputs stand side by side in y. cut: a name of `partition.CUTS`,
    which divides the inputs or the outputs. in_axis, out_axis: which axis of in_shape or out_shape
    the cut divides, such as heads or channels. std: standard deviation of the initial weights.
    bias: whether there is one. rows: which side comes first in the weight's logical shape, "in" or
    "out". A file holds one row after the other, so the form on disk decides.

    A column cut divides the bias with the outputs. For the other cuts the bias is whole on every
    rank and added once, after the barrier. Added before a row cut's sum, it would count once per
    rank.
    """

    def __init__(self, context, name, in_shape, out_shape, *, cut, std, in_axis=0, out_axis=0,
                 bias=True, rows="in"):
        self.ops, self.name, self.comm = context.ops, name, context.tp
        self.cut, self.rows = CUTS[cut], rows
        parts = out_shape if isinstance(out_shape, list) else [Part(name, out_shape)]
        in_first = rows == "in"
        cut_axis = (in_axis + (0 if in_first else len(parts[0].shape)),
                    out_axis + (len(in_shape) if in_first else 0))[self.cut.shard_axis]
        weights = [
            Param(context, f"{part.name}.w",
                  (*in_shape, *part.shape) if in_first else (*part.shape, *in_shape),
                  cut_axis=cut_axis, pieces=part.pieces, std=std) for part in parts]
        biases = [
            Param(context, f"{part.name}.b", part.shape, fill=0.0, decay=False,
                  cut_axis=out_axis if self.cut.bias_is_cut else None, pieces=part.pieces)
            for part in parts if bias]
        self.params = [*weights, *biases]
        local = weights[0].local_shape
        self.inner = math.prod(local[:len(in_shape)] if in_first else local[-len(in_shape):])
        # Parameters that lie side by side are multiplied as one.
        self.weights, self.biases = joined(weights), joined(biases)
        self.columns = runs([one.size for one in self.biases])  # of y
        # What the cut multiplies with; a convolution has its own.
        self.product = context.ops if len(self.weights) == 1 else SeveralProducts(context.ops)
        self.sizes = Sizes(None, math.prod(in_shape), sum(math.prod(part.shape) for part in parts))

    @property
    def w(self):
        """The weight of a layer that has one."""
        weight, = self.weights
        return weight

    @property
    def b(self):
        """The bias of a layer that has one."""
        bias, = self.biases
        return bias

    def _matrix(self, kind):
        """The weights, or their gradients, in their logical local shapes, as a matrix (K, N)."""
        arrays = [getattr(one, kind) for one in self.weights]
        found = [array.reshape(self.inner, -1) if self.rows == "in"
                 else array.reshape(-1, self.inner).T for array in arrays]
        return found[0] if len(found) == 1 else Matrices(found)

    def _sizes(self, stash):
        """Sizes of the uncut product, with the number of tokens where the cut divides them."""
        if not self.cut.tokens_are_cut:
            return self.sizes
        return self.sizes._replace(tokens=stash.batch.shape[1])

    def forward(self, x, stash):
        """y (.., N) of x (.., K), local sizes as the cut leaves them. Comm: forward of the cut."""
        y = self.forward_without_bias(x, stash)
        for bias, columns in zip(self.biases, self.columns, strict=True):
            self.ops.bias_forward(y[..., columns], bias.data.reshape(-1))
        return y

    def forward_without_bias(self, x, stash):
        """y (.., N) of x (.., K), for a caller that adds the bias. Comm: forward of the cut."""
        self.keep(x, stash)
        w, sizes = self._matrix("data"), self._sizes(stash)
        return self.cut.forward(self.product, x, w, self.comm, self.name, sizes)

    def keep(self, x, stash):
        """Keep x for the weight gradient."""
        stash[self.name, "x"] = x

    def keep_no_longer(self, stash):
        """Drop what forward has kept; the caller gives it to `keep` again before backward."""
        del stash[self.name, "x"]

    def backward_input(self, dy, stash):
        """dx (.., K) of dy (.., N). Comm: backward_input of the cut."""
        w, sizes = self._matrix("data"), self._sizes(stash)
        dx, dy = self.cut.backward_input(self.product, dy, w, self.comm, self.name, sizes)
        stash[self.name, "dy"] = dy
        return dx

    def backward_weight(self, stash):
        """Accumulate the gradients of w and b. Comm: backward_weight of the cut."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        dw, sizes = self._matrix("grad"), self._sizes(stash)
        self.cut.backward_weight(self.product, x, dy, dw, self.comm, self.name, sizes)
        for bias, columns in zip(self.biases, self.columns, strict=True):
            self.ops.bias_backward_weight(dy[..., columns], bias.grad.reshape(-1))


class Matrices:
    """Matrices (K, N1), (K, N2), .. that stand side by side but do not lie so in memory."""

    def __init__(self, each):
        self.each = each
        self.columns = runs([one.shape[1] for one in each])
        self.shape = each[0].shape[0], self.columns[-1].stop


class SeveralProducts:
    """The product of x with `Matrices`, in place of `ops` in a cut.

    empty, zeros, copy: those of `ops`, for what a cut does with tokens.
    """

    def __init__(self, ops):
        self.ops = ops
        self.empty, self.zeros, self.copy = ops.empty, ops.zeros, ops.copy
        self.accumulate = ops.accumulate

    def matmul(self, x, w):
        """y (.., N)."""
        y = self.ops.empty((*x.shape[:-1], w.shape[1]), x.dtype)
        for one, columns in zip(w.each, w.columns, strict=True):
            self.ops.copy(y[..., columns], self.ops.matmul(x, one))
        return y

    def matmul_nt(self, dy, w):
        """dx (.., K), the sum over the matrices."""
        first, *others = [self.ops.matmul_nt(dy[..., columns], one)
                          for one, columns in zip(w.each, w.columns, strict=True)]
        for other in others:
            self.ops.accumulate(first, other)
        return first

    def matmul_tn_add(self, x, dy, dw):
        """Add x^T dy to each matrix of dw."""
        for one, columns in zip(dw.each, dw.columns, strict=True):
            self.ops.matmul_tn_add(x, dy[..., columns], one)
