"""Convolution cut by channels, and pooling.

A convolution multiplies each patch of the image, (k, k, C) numbers, by a matrix (k*k*C, N). The
cuts of products (mpipar/partition) therefore apply, by output channels N or input channels C. Every
rank has all places of the image, and what travels is whole images of some channels, never patches.
Letters: B images, H and W their height and width, C channels in, N channels out, k the kernel's
width, P and Q the output's height and width.
"""

from __future__ import annotations

from typing import Any

from mpipar.layers.context import Context
from mpipar.layers.linear import Linear
from mpipar.layers.param import Param
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array
from mpipar.partition import Sizes

PATCH = "*k*k"  # what a patch has besides channels, in the form that `product_cost` takes


class PatchProduct:
    """The `partition.contracts.Product` of every patch of x (B, H, W, C) with w (k*k*C, N).

    name: of the layer, for --trace-ops. size: (H, W), which y's shape does not determine.
    """

    def __init__(
        self, ops: Any, name: str, size: tuple[int, int], kernel: int, stride: int, padding: int
    ) -> None:
        self.ops, self.name, self.size = ops, name, size
        self.window = kernel, stride, padding

    def matmul(self, x: Array, w: Array) -> Array:
        """Return y (B, P, Q, N)."""
        return self.ops.matmul(self.ops.unfold_forward(x, *self.window), w)

    def matmul_nt(self, dy: Array, w: Array) -> Array:
        """Return dx (B, H, W, C) of dy (B, P, Q, N)."""
        dpatches = self.ops.matmul_nt(dy, w)
        kernel = self.window[0]
        shape = (dy.shape[0], *self.size, w.shape[0] // kernel**2)
        return self.ops.unfold_backward_input(dpatches, shape, *self.window)

    def matmul_tn_add(self, x: Array, dy: Array, dw: Array) -> None:
        """Add patches^T dy to dw (k*k*C, N).

        The patches are recomputed rather than kept, since they take k*k times the memory of x.
        """
        self.ops.matmul_tn_add(self.ops.unfold_forward(x, *self.window), dy, dw)


class Conv(Linear):
    """y (B, P, Q, N) = patches of x (B, H, W, C) @ w + b: a Linear layer with another product.

    size: (H, W). channels: (C, N). The weight's logical shape is (k, k, C, N), cut on C or N.
    Comm: the barriers of the cut.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        size: tuple[int, int],
        channels: tuple[int, int],
        *,
        cut: str,
        std: float,
        kernel: int = 3,
        stride: int = 1,
        padding: int = 1,
    ) -> None:
        in_shape, out_shape = (kernel, kernel, channels[0]), channels[1:]
        super().__init__(context, name, in_shape, out_shape, cut=cut, std=std, in_axis=2)
        self.product = PatchProduct(context.ops, name, size, kernel, stride, padding)
        self.sizes = Sizes(0, *channels)  # not those of patches, because images travel


class MaxPool:
    """The maximum of each 2 x 2 tile, by channel; an odd last row or column is dropped."""

    params: tuple[Param, ...] = ()
    width = 2

    def __init__(self, context: Context, name: str) -> None:
        self.ops, self.name = context.ops, name

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, H/2, W/2, C) of x (B, H, W, C)."""
        y, places = self.ops.maxpool_forward(x, self.width)
        stash[self.name, "places"] = places, x.shape
        return y

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, H, W, C) of dy (B, H/2, W/2, C)."""
        return self.ops.maxpool_backward_input(dy, *stash.pop((self.name, "places")), self.width)

    def backward_weight(self, stash: Stash) -> None:
        """Do nothing: there is no weight."""


class MeanPool:
    """The mean over all places of an image, by channel."""

    params: tuple[Param, ...] = ()

    def __init__(self, context: Context, name: str) -> None:
        self.ops, self.name = context.ops, name

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, C) of x (B, H, W, C)."""
        stash[self.name, "shape"] = x.shape
        return self.ops.meanpool_forward(x)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, H, W, C) of dy (B, C)."""
        return self.ops.meanpool_backward_input(dy, stash.pop((self.name, "shape")))

    def backward_weight(self, stash: Stash) -> None:
        """Do nothing: there is no weight."""
