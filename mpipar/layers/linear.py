"""Linear layer: a product cut over ranks (see mpipar/partition) and its bias.

Letters: B batch, T tokens, D model width; K and N stand for the product's two widths.
"""

from __future__ import annotations

import math

from mpipar.layers.param import Param
from mpipar.partition import CUTS, Sizes


class Linear:
    """y = x @ w + b.

    in_shape, out_shape: logical shapes of the two sides, e.g. (D,) and (3, H, d); `shard` is the
    axis of the weight's logical shape in_shape + out_shape that is cut: the head axis, the ffn
    axis, ... The bias of a column cut is cut with the outputs; for the others it is whole on
    every rank and added once, after the barrier (adding it before a row cut's sum would count it
    once per rank).
    """

    def __init__(self, ops, name, in_shape, out_shape, cut, shard, comm, std):
        self.ops, self.name, self.comm = ops, name, comm
        self.product = ops  # what the cut multiplies with; a convolution has its own
        self.cut = CUTS[cut]
        shape = (*in_shape, *out_shape)
        self.w = Param(f"{name}.w", shape, comm, shard, std=std)
        bias_axis = shard - len(in_shape) if self.cut.bias_is_cut else None
        self.b = Param(f"{name}.b", out_shape, comm, bias_axis, fill=0.0, decay=False)
        self.params = [self.w, self.b]
        self.num_in = len(in_shape)
        self.widths = math.prod(in_shape), math.prod(out_shape)  # K and N before they are cut

    def _matrix(self, array):
        """The weight's (or its gradient's) logical local shape as a matrix (K, N)."""
        return array.reshape(math.prod(array.shape[:self.num_in]), -1)

    def _sizes(self, stash):
        """Of the uncut product, for the cut."""
        return Sizes(stash.batch.shape[1], *self.widths)

    def forward(self, x, stash):
        """y (.., N) of x (.., K), local sizes as the cut leaves them. Comm: forward of the cut."""
        return self.ops.bias_forward(self.multiply(x, stash), self.b.data.reshape(-1))

    def multiply(self, x, stash):
        """y (.., N) of x (.., K), bias not yet added. Comm: forward of the cut."""
        stash[self.name, "x"] = x
        w, sizes = self._matrix(self.w.data), self._sizes(stash)
        return self.cut.forward(self.product, x, w, self.comm, self.name, sizes)

    def backward_input(self, dy, stash):
        """dx (.., K) of dy (.., N). Comm: backward_input of the cut."""
        w, sizes = self._matrix(self.w.data), self._sizes(stash)
        dx, dy = self.cut.backward_input(self.product, dy, w, self.comm, self.name, sizes)
        stash[self.name, "dy"] = dy
        return dx

    def backward_weight(self, stash):
        """Accumulate the gradients of w and b. Comm: backward_weight of the cut."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        dw, sizes = self._matrix(self.w.grad), self._sizes(stash)
        self.cut.backward_weight(self.product, x, dy, dw, self.comm, self.name, sizes)
        self.ops.bias_backward_weight(dy, self.b.grad.reshape(-1))
