"""The array functions for the CPU: those that NumPy computes in another way than `array_ops`.

The formulas of `array_ops` run in tiles (`numpy_tiles`). This file has the sums that BLAS makes
faster, the products that are added to an array, and the embeddings. Buffers belong to the object,
and a constant bounds them. Letters as in `array_ops`.
"""

import math

import numpy as np

from mpipar.ops.array_ops import as_rows
from mpipar.ops.numpy_attention import NumpyAttention
from mpipar.ops.numpy_tiles import TiledOps, cut

# Elements of the scratch buffer through which a product is added to a weight gradient.
PRODUCT_TILE = 1 << 20
SHORT_SUM = 256  # numbers that are added up without loss: sums of all have float64
# Up to so many rows, a product with a matrix is faster as (w^T x^T)^T: BLAS packs its right operand
# anew in every product, and here that is the few rows, not the weight.
FEW_ROWS = 16


class NumpyOps(NumpyAttention, TiledOps):
    """The array functions of `ArrayOps` on NumPy."""

    def __init__(self, dtype):
        super().__init__(np, dtype, "cpu")
        self._buffers = {}

    def _buffer(self, name, shape):
        """Return an uninitialised array that the next call with this name overwrites."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.empty(size, self.dtype)
        return self._buffers[name][:size].reshape(shape)

    # Sums. BLAS adds up rows twice as fast as sum().

    def _row_sums(self, x):
        return x @ np.ones(x.shape[-1], x.dtype)

    def _row_dots(self, x, y):
        return np.vecdot(x, y)

    def _column_sums(self, x, factors=None):
        rows = as_rows(x)
        return (np.ones(len(rows), x.dtype) if factors is None else factors.reshape(-1)) @ rows

    def square_sum(self, x):
        """Return the sum of squares of x as a host float, accumulated in float64.

        BLAS sums SHORT_SUM squares at a time in the type of x, unless one is too large for it.
        """
        flat = x.reshape(-1)
        rest = flat.size % SHORT_SUM
        rows = flat[rest:].reshape(-1, SHORT_SUM)
        with np.errstate(over="ignore"):
            total = sum(float(np.vecdot(part, part).sum(dtype=np.float64))
                        for part in (rows, flat[None, :rest]))
        return total if math.isfinite(total) else super().square_sum(x)

    # Products.

    def matmul(self, x, w):
        """Return x w: (..., K) times (K, M) gives (..., M)."""
        rows = as_rows(x)
        return _product(rows, w).reshape(*x.shape[:-1], w.shape[1])

    def matmul_nt(self, x, w):
        """Return x w^T: (..., M) and (K, M) give (..., K)."""
        return self.matmul(x, w.T)

    def matmul_tn_add(self, x, y, out):
        """Add x^T y to out: (..., K) and (..., M) give (K, M); out may be a transposed view.

        NumPy cannot make BLAS add to its output. So the product goes through a scratch buffer, in
        blocks of rows of out. The added pass reads it from cache (0.05 ms after a product of 9 ms).
        """
        assert out.shape == (x.shape[-1], y.shape[-1]), (out.shape, x.shape, y.shape)
        left, right = as_rows(x), as_rows(y)
        if out.strides[0] < out.strides[1]:  # the gradient of a tied table: (x^T y)^T = y^T x
            left, right, out = right, left, out.T
        step = max(64, PRODUCT_TILE // max(1, out.shape[1]))
        for first in range(0, out.shape[0], step):
            block = out[first : first + step]
            product = self._buffer("product", block.shape)
            np.matmul(left[:, first : first + step].T, right, out=product)
            block += product

    # Rotary positions, in tiles of tokens.

    def _rotate(self, x, cos, sin):
        whole = *x.shape[:2], cos.shape[-1]
        cos, sin = np.broadcast_to(cos, whole), np.broadcast_to(sin, whole)
        for row in range(len(x)):
            for tile in cut(x.shape[1], x.shape[2] * x.shape[3]):
                super()._rotate(x[row, tile], cos[row, tile], sin[row, tile])

    # Embeddings.

    def embedding_backward_weight(self, ids, dy, dtable, start):
        """Add each row of dy (..., D) to the row of dtable of its id, if this shard holds it."""
        local = (ids - start).reshape(-1).tolist()
        for row, dy_row in zip(local, as_rows(dy), strict=True):  # 5 times faster than np.add.at
            if 0 <= row < len(dtable):
                dtable[row] += dy_row

    def position_backward_weight(self, positions, dy, dtable):
        """Add the batch sum of dy (B, T, D) to the rows `positions` of dtable."""
        self.embedding_backward_weight(positions, dy.sum(axis=0), dtable, 0)


def _product(x, w):
    """Return x (rows, K) times w (K, M), C-contiguous."""
    if 1 < len(x) <= FEW_ROWS:
        return np.ascontiguousarray((w.T @ x.T).T)
    return x @ w
