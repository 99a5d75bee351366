"""Linear layer: a product cut over ranks (see mpipar/partition) and its bias.

Letters: B batch, T tokens, D model width; K and N stand for the product's two widths.
"""

from __future__ import annotations

import math

from mpipar.layers.param import Param
from mpipar.partition import CUTS, Sizes


class Linear:
    """y = x @ w + b.

    in_shape, out_shape: logical shapes of the two sides, e.g. (D,) and (3, H, d); the weight's is
    in_shape + out_shape. cut: a name of `partition.CUTS`, which divides the inputs or the outputs.
    in_axis, out_axis: which axis of in_shape or out_shape the cut divides, such as heads or
    channels. std: standard deviation of the initial weights.

    A column cut divides the bias with the outputs. For the other cuts the bias is whole on every
    rank and added once, after the barrier. Added before a row cut's sum, it would count once per
    rank.
    """

    def __init__(self, context, name, in_shape, out_shape, *, cut, std, in_axis=0, out_axis=0):
        self.ops, self.name, self.comm = context.ops, name, context.tp
        self.product = context.ops  # what the cut multiplies with; a convolution has its own
        self.cut = CUTS[cut]
        self.num_in = len(in_shape)
        cut_axis = (in_axis, self.num_in + out_axis)[self.cut.shard_axis]
        self.w = Param(context, f"{name}.w", (*in_shape, *out_shape), cut_axis=cut_axis, std=std)
        self.b = Param(context, f"{name}.b", out_shape, fill=0.0, decay=False,
                       cut_axis=out_axis if self.cut.bias_is_cut else None)
        self.params = [self.w, self.b]
        self.sizes = Sizes(None, math.prod(in_shape), math.prod(out_shape))

    def _matrix(self, array):
        """The weight's (or its gradient's) logical local shape as a matrix (K, N)."""
        return array.reshape(math.prod(array.shape[:self.num_in]), -1)

    def _sizes(self, stash):
        """Sizes of the uncut product, with the number of tokens where the cut divides them."""
        if not self.cut.tokens_are_cut:
            return self.sizes
        return self.sizes._replace(tokens=stash.batch.shape[1])

    def forward(self, x, stash):
        """y (.., N) of x (.., K), local sizes as the cut leaves them. Comm: forward of the cut."""
        return self.ops.bias_forward(self.forward_without_bias(x, stash), self.b.data.reshape(-1))

    def forward_without_bias(self, x, stash):
        """y (.., N) of x (.., K), for a caller that adds the bias. Comm: forward of the cut."""
        self.keep(x, stash)
        w, sizes = self._matrix(self.w.data), self._sizes(stash)
        return self.cut.forward(self.product, x, w, self.comm, self.name, sizes)

    def keep(self, x, stash):
        """Keep x for the weight gradient."""
        stash[self.name, "x"] = x

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
