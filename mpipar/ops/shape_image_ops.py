"""The array functions of images on shapes only. Letters as in `image_ops`."""

import numpy as np

from mpipar.ops.image_ops import out_length


class ShapeImageOps:
    """Patches and pooling on `ShapeArray`: each allocates what the one of `ImageOps` allocates."""

    def unfold_forward(self, x, kernel, stride, padding):
        """Return (B, P, Q, k*k*C)."""
        batch, height, width, channels = x.shape
        sides = [out_length(length, kernel, stride, padding) for length in (height, width)]
        padded = self.empty((batch, height + 2 * padding, width + 2 * padding, channels))
        patches = self.empty((batch, *sides, kernel * kernel * channels))
        del padded
        return patches

    def unfold_backward_input(self, dy, shape, kernel, stride, padding):
        """Return dx of x's shape."""
        batch, height, width, channels = shape
        sides = [out_length(length, kernel, stride, padding) for length in (height, width)]
        assert dy.shape == (batch, *sides, kernel * kernel * channels), (dy.shape, shape)
        dpadded = self.empty((batch, height + 2 * padding, width + 2 * padding, channels))
        return self.empty(shape) if padding else dpadded

    def maxpool_forward(self, x, width):
        """Return (y, places)."""
        batch, height, length, channels = x.shape
        shape = (batch, height // width, length // width, channels)
        tiles = self.empty((width * width, *shape))
        y, places = self.empty(shape), self.empty(shape, np.int64)
        del tiles
        return y, places

    def maxpool_backward_input(self, dy, places, shape, width):
        """Return dx of x's shape."""
        assert dy.shape == places.shape, (dy.shape, places.shape)
        return self.empty(shape)

    def meanpool_forward(self, x):
        """Return (B, C)."""
        return self.empty((x.shape[0], x.shape[3]))

    def meanpool_backward_input(self, dy, shape):
        """Return dx of x's shape."""
        assert dy.shape == (shape[0], shape[3]), (dy.shape, shape)
        return self.empty(shape)
