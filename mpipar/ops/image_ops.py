"""Array functions of images, for NumPy and CuPy alike: patches of a convolution, and pooling.

Letters: B images, H and W their height and width, k the width of a square kernel. P and Q are the
height and width of the result. C channels come last, so that a product over channels reads
neighbours.
"""


def out_length(length, kernel, stride, padding):
    """How many places a kernel has along one side of an image."""
    return (length + 2 * padding - kernel) // stride + 1


class ImageOps:
    """Patches and pooling over `xp` (the module numpy or cupy)."""

    def unfold_forward(self, x, kernel, stride, padding):
        """Return the patch (k, k, C) under every place of the kernel: (B, P, Q, k*k*C) of x.

        The edges of x (B, H, W, C) are padded with `padding` zeros.
        """
        batch, height, width, channels = x.shape
        sides = [out_length(length, kernel, stride, padding) for length in (height, width)]
        padded = self.zeros((batch, height + 2 * padding, width + 2 * padding, channels))
        padded[:, padding:padding + height, padding:padding + width] = x
        patches = self.empty((batch, *sides, kernel, kernel, channels))
        for (i, j), view in _windows(padded, sides, kernel, stride):
            patches[:, :, :, i, j] = view
        return patches.reshape(batch, *sides, -1)

    def unfold_backward_input(self, dy, shape, kernel, stride, padding):
        """Return dx of x's shape (B, H, W, C): each entry sums the patches that hold it."""
        batch, height, width, channels = shape
        dpadded = self.zeros((batch, height + 2 * padding, width + 2 * padding, channels))
        dy = dy.reshape(*dy.shape[:3], kernel, kernel, channels)
        for (i, j), view in _windows(dpadded, dy.shape[1:3], kernel, stride):
            self.accumulate(view, dy[:, :, :, i, j])
        dx = dpadded[:, padding:padding + height, padding:padding + width]
        return self.xp.ascontiguousarray(dx)

    def maxpool_forward(self, x, width):
        """Return (y, places): the largest of each width x width tile of x (B, H, W, C), and where
        it is.

        A rest at the far edges that is smaller than a tile is dropped.
        """
        views = [_tile(x, width, *divmod(place, width)) for place in range(width * width)]
        tiles = self.xp.stack(views)
        return tiles.max(axis=0), tiles.argmax(axis=0)

    def maxpool_backward_input(self, dy, places, shape, width):
        """Return dx of x's shape: dy where the largest was (the first of equal ones), zero
        elsewhere.
        """
        dx = self.zeros(shape)
        for place in range(width * width):
            view = _tile(dx, width, *divmod(place, width))
            view[...] = self.xp.where(places == place, dy, self.scalar(0.0))
        return dx

    def meanpool_forward(self, x):
        """Return the mean over the places of x (B, H, W, C): (B, C)."""
        return x.mean(axis=(1, 2))

    def meanpool_backward_input(self, dy, shape):
        """Return dx of x's shape (B, H, W, C): an equal share of dy (B, C) for every place."""
        dx = self.empty(shape)
        dx[...] = (dy * self.scalar(1.0 / (shape[1] * shape[2])))[:, None, None]
        return dx


def _windows(padded, sides, kernel, stride):
    """Yield ((i, j), the entries of padded that entry i, j of the kernel meets at its places)."""
    for i in range(kernel):
        for j in range(kernel):
            rows = slice(i, i + stride * (sides[0] - 1) + 1, stride)
            columns = slice(j, j + stride * (sides[1] - 1) + 1, stride)
            yield (i, j), padded[:, rows, columns]


def _tile(x, width, row, column):
    """Return entry (row, column) of each whole tile of x (B, H, W, C), as a view."""
    rows, columns = (length // width * width for length in x.shape[1:3])
    return x[:, row:rows:width, column:columns:width]


# What the table of functions cannot say: (sizes that follow from a window, shapes of scratch).


def _unfold_sizes(sizes, given):
    kernel, stride, padding = (given[name] for name in ("kernel", "stride", "padding"))
    batch, height, width, channels = (sizes[letter] for letter in "BHWC")
    more = {"P": out_length(height, kernel, stride, padding),
            "Q": out_length(width, kernel, stride, padding), "K": kernel * kernel * channels}
    padded = (batch, height + 2 * padding, width + 2 * padding, channels)
    # Without padding the gradient is the scratch array itself.
    return more, [padded] if padding or "dy" not in given else []


def _maxpool_sizes(sizes, given):
    batch, height, width, channels = (sizes[letter] for letter in "BHWC")
    side = given["width"]
    more = {"P": height // side, "Q": width // side}
    tiles = (side * side, batch, *more.values(), channels)
    return more, [] if "dy" in given else [tiles]


IMAGE_SIZES = {
    "unfold_forward": _unfold_sizes, "unfold_backward_input": _unfold_sizes,
    "maxpool_forward": _maxpool_sizes, "maxpool_backward_input": _maxpool_sizes,
}
