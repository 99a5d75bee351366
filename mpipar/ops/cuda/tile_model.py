"""GEMM in the tile model: a kernel says what happens to tiles, the compiler chooses threads.

The package `cuda-tile` (extra `tile`) compiles these functions for the device: where it has them,
wgmma, TMA copies and a pipeline over k, none of which is written here. `ct` is that package, or in
tests a stand-in on NumPy arrays.
"""

import numpy as np

from mpipar.ops.cuda.gemm import checked

TILES = {4: (64, 64, 32), 2: (128, 128, 64)}  # bytes of an element: tm, tn, tk


class TileModelGemm:
    """The product by the kernel below; like `gemm.BlasGemm`."""

    def __init__(self, xp, ct):
        self._xp, self._ct = xp, ct
        self._kernel = gemm_kernel(ct)

    def __call__(self, a, b, out, accumulate=False):
        """Write a b to out (or add it); a (M, K), b (K, N), out (M, N)."""
        a, b, out = checked(a, b, out)
        tiles = TILES[a.itemsize]
        grid = tuple(int(np.ceil(n / tile)) for n, tile in zip(out.shape, tiles[:2], strict=True))
        self._ct.launch(self._xp.cuda.get_current_stream(), grid, self._kernel,
                        (a, b, out, int(accumulate), *tiles))


def gemm_kernel(ct):
    """Return the kernel c = a b (+ c): a (M, K), b (K, N), c (M, N), any strides.

    A block computes tm x tn of c in steps of tk; tile sizes are powers of two. Sums are float32.
    accumulate: 1 adds to c, 0 does not read it. What lies outside an array is read as zero and not
    written. Traffic of a step: (tm + tn) tk elements per 2 tm tn tk FLOPs.
    """
    constant = ct.Constant[int]

    @ct.kernel
    def gemm(a, b, c, accumulate: constant, tm: constant, tn: constant, tk: constant):
        row, column = ct.bid(0), ct.bid(1)
        total = ct.full((tm, tn), 0.0, dtype=ct.float32)
        for k in range(ct.num_tiles(a, 1, shape=(tm, tk))):
            left = ct.load(a, (row, k), shape=(tm, tk), padding_mode=ct.PaddingMode.ZERO)
            right = ct.load(b, (k, column), shape=(tk, tn), padding_mode=ct.PaddingMode.ZERO)
            total = ct.mma(left, right, total)
        if accumulate:
            total = total + ct.astype(ct.load(c, (row, column), shape=(tm, tn)), ct.float32)
        ct.store(c, (row, column), ct.astype(total, c.dtype))

    return gemm
