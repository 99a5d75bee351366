"""The array functions tuned for the CPU: the arithmetic of `array_ops` in tiles that stay in cache.

What an elementwise chain costs on a CPU is its temporaries, so each chain runs over a tile of rows
with `out=` and in-place operators, the next tile after it. Buffers belong to the object and are
bounded by a tile. Letters as in `array_ops`.
"""

import math

import numpy as np

from mpipar.ops.array_ops import GELU_A, GELU_B, ArrayOps, as_rows
from mpipar.ops.numpy_attention import NumpyAttention

# Elements of a tile: 170 rows of 384. Three float32 tiles fit a 1 MiB L2 cache. 2^14 is 20 % slower
# (interpreter time); no tiles at all cost the same only where the L3 cache holds the whole array.
TILE = 1 << 16
# Elements of the scratch buffer through which a product is added to a weight gradient.
PRODUCT_TILE = 1 << 20


class NumpyOps(NumpyAttention, ArrayOps):
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

    def _tiles(self, rows, width):
        """Yield slices that cut `rows` rows of `width` elements into tiles."""
        step = max(1, TILE // max(1, width))
        for first in range(0, rows, step):
            yield slice(first, min(first + step, rows))

    def square_sum(self, x):
        """Return the sum of squares of x as a host float, accumulated in float64."""
        flat, total = x.reshape(-1), 0.0
        for tile in self._tiles(flat.size, 1):
            part = flat[tile].astype(np.float64)
            total += float(part @ part)
        return total

    # Products.

    def matmul_tn_add(self, x, y, out):
        """Add x^T y to out: (..., K) and (..., M) give (K, M); out may be a transposed view.

        NumPy cannot make BLAS add to its output, so the product goes through a scratch buffer, in
        blocks of rows of out: the added pass reads it from cache (0.05 ms after a product of 9 ms).
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

    def bias_backward_weight(self, dy, db):
        """Add the sum of dy (..., M) over its leading dimensions to db (M,)."""
        assert dy.shape[-1:] == db.shape, (dy.shape, db.shape)
        rows = as_rows(dy)
        db += self._ones(len(rows)) @ rows  # BLAS adds rows up twice as fast as sum(axis=0)

    def _ones(self, count):
        return np.ones(count, self.dtype)

    # GELU.

    def gelu_forward(self, x):
        """Return the tanh form of GELU of x."""
        a, b, half, one = map(self.scalar, (GELU_A, GELU_B, 0.5, 1.0))
        y = np.empty(x.shape, self.dtype)
        x_flat, y_flat = x.reshape(-1), y.reshape(-1)
        for tile in self._tiles(x.size, 1):
            x_tile, t = x_flat[tile], y_flat[tile]
            np.multiply(x_tile, x_tile, out=t)
            t *= b
            t += a
            t *= x_tile
            np.tanh(t, out=t)
            t += one
            t *= x_tile
            t *= half
        return y

    def gelu_backward_input(self, dy, x):
        """Return dx = dy GELU'(x), with s = x u' as 0.5 (1 + t) (1 + (1 - t) s): one pass less."""
        a, b, half, one = map(self.scalar, (GELU_A, GELU_B, 0.5, 1.0))
        b3 = self.scalar(3.0 * GELU_B)
        dx = np.empty(x.shape, self.dtype)
        x_flat, dx_flat, dy_flat = x.reshape(-1), dx.reshape(-1), dy.reshape(-1)
        for tile in self._tiles(x.size, 1):
            x_tile, out = x_flat[tile], dx_flat[tile]
            s = self._buffer("first", x_tile.shape)
            t = self._buffer("second", x_tile.shape)
            np.multiply(x_tile, x_tile, out=s)
            np.multiply(s, b, out=t)
            t += a
            t *= x_tile
            np.tanh(t, out=t)
            s *= b3
            s += a
            s *= x_tile
            np.subtract(one, t, out=out)
            out *= s
            out += one
            t += one
            out *= t
            out *= half
            out *= dy_flat[tile]
        return dx

    # Norms. LayerNorm is RMSNorm of x - mean, plus b.

    def rmsnorm_forward(self, x, w, eps):
        """Return (y, rstd): x (..., D) times rstd = 1 / sqrt(mean(x^2) + eps), scaled; rstd (...).

        Zhang and Sennrich 2019, arXiv 1910.07467.
        """
        y, rstd = np.empty(x.shape, self.dtype), np.empty(x.shape[:-1], self.dtype)
        x_rows, y_rows, rstd_flat = as_rows(x), as_rows(y), rstd.ravel()
        for tile in self._tiles(*x_rows.shape):
            self._rms_tile(x_rows[tile], w, eps, y_rows[tile], rstd_flat[tile])
        return y, rstd

    def _rms_tile(self, x, w, eps, y, r):
        """Write RMSNorm of a tile x (n, D) to y, which may be x, and its rstd to r (n,)."""
        np.vecdot(x, x, out=r)
        r /= self.scalar(x.shape[-1])
        r += self.scalar(eps)
        np.sqrt(r, out=r)
        np.reciprocal(r, out=r)
        np.multiply(x, r[:, None], out=y)
        y *= w

    def rmsnorm_backward_input(self, dy, x, w, rstd):
        """Return dx = rstd (g - xhat mean(g xhat)), where g = dy w and xhat = x rstd."""
        dx, rstd = np.empty(x.shape, self.dtype), rstd.reshape(-1, 1)
        dy_rows, x_rows, dx_rows = as_rows(dy), as_rows(x), as_rows(dx)
        for tile in self._tiles(*x_rows.shape):
            self._rms_backward_tile(dy_rows[tile], x_rows[tile], w, rstd[tile], dx_rows[tile])
        return dx

    def _rms_backward_tile(self, dy, x, w, r, dx):
        """Write the gradient of a tile x (n, D) of RMSNorm to dx, which may be x; r (n, 1)."""
        g = self._buffer("first", x.shape)
        np.multiply(dy, w, out=g)
        xhat = np.multiply(x, r, out=dx)
        slope = np.vecdot(g, xhat)
        slope /= self.scalar(x.shape[-1])
        xhat *= slope[:, None]
        np.subtract(g, xhat, out=dx)
        dx *= r

    def rmsnorm_backward_weight(self, dy, x, rstd, dw):
        """Add the sum of dy xhat to dw (D,)."""
        dy_rows, x_rows, rstd = as_rows(dy), as_rows(x), rstd.reshape(-1)
        for tile in self._tiles(*x_rows.shape):
            part = self._buffer("first", x_rows[tile].shape)
            np.multiply(dy_rows[tile], x_rows[tile], out=part)
            dw += rstd[tile] @ part  # the factor rstd of each row comes with the sum over rows

    def layernorm_forward(self, x, w, b, eps):
        """Return (y, mean, rstd): x (..., D) normalised and scaled, mean and rstd (...)."""
        y = np.empty(x.shape, self.dtype)
        mean, rstd = np.empty(x.shape[:-1], self.dtype), np.empty(x.shape[:-1], self.dtype)
        x_rows, y_rows, mean_flat, rstd_flat = as_rows(x), as_rows(y), mean.ravel(), rstd.ravel()
        average = self._average(x.shape[-1])
        for tile in self._tiles(*x_rows.shape):
            out, m = y_rows[tile], mean_flat[tile]
            np.matmul(x_rows[tile], average, out=m)
            np.subtract(x_rows[tile], m[:, None], out=out)
            self._rms_tile(out, w, eps, out, rstd_flat[tile])
            out += b
        return y, mean, rstd

    def _average(self, width):
        """Return the column by which a row is multiplied to give its mean."""
        return self._ones(width) / self.scalar(width)

    def layernorm_backward_input(self, dy, x, w, mean, rstd):
        """Return dx = c - mean(c), where c is the gradient of x - mean."""
        dx, mean, rstd = np.empty(x.shape, self.dtype), mean.reshape(-1, 1), rstd.reshape(-1, 1)
        dy_rows, x_rows, dx_rows = as_rows(dy), as_rows(x), as_rows(dx)
        average = self._average(x.shape[-1])
        for tile in self._tiles(*x_rows.shape):
            part = dx_rows[tile]
            np.subtract(x_rows[tile], mean[tile], out=part)
            self._rms_backward_tile(dy_rows[tile], part, w, rstd[tile], part)
            part -= (part @ average)[:, None]
        return dx

    def layernorm_backward_weight(self, dy, x, mean, rstd, dw, db):
        """Add the sum of dy xhat to dw (D,) and the sum of dy to db (D,)."""
        dy_rows, x_rows = as_rows(dy), as_rows(x)
        mean, rstd = mean.reshape(-1, 1), rstd.reshape(-1)
        for tile in self._tiles(*x_rows.shape):
            part = self._buffer("first", x_rows[tile].shape)
            np.subtract(x_rows[tile], mean[tile], out=part)
            part *= dy_rows[tile]
            dw += rstd[tile] @ part
        self.bias_backward_weight(dy, db)

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

    # Loss over a vocabulary shard.

    def _max_and_sum(self, valid, stats):
        ones = self._ones(valid.shape[1])
        for tile in self._tiles(*valid.shape):
            part = self._buffer("first", valid[tile].shape)
            np.max(valid[tile], axis=1, out=stats[tile, 0])
            np.subtract(valid[tile], stats[tile, :1], out=part)
            np.exp(part, out=part)
            np.matmul(part, ones, out=stats[tile, 1])

    def _scaled_softmax(self, valid, lse, scale):
        for tile in self._tiles(*valid.shape):
            part = valid[tile]
            part -= lse[tile, None]
            np.exp(part, out=part)
            part *= self.scalar(scale)

    # Updates of flat buffers in place.

    def sgd_step(self, data, grad, lr):
        """Subtract lr * grad from data."""
        for tile in self._tiles(data.size, 1):
            part = self._buffer("first", data[tile].shape)
            np.multiply(grad[tile], self.scalar(lr), out=part)
            data[tile] -= part

    def adamw_step(
        self, data, grad, m, v, lr, beta1, beta2, eps, weight_decay, step, copy=None
    ):
        """Update data, m, v in place as `ArrayOps.adamw_step` does; step counts from 1."""
        cast = self.scalar
        rest1, rest2, decay = cast(1.0 - beta1), cast(1.0 - beta2), cast(1.0 - lr * weight_decay)
        root, rate = cast((1.0 - beta2**step) ** -0.5), cast(lr / (1.0 - beta1**step))
        beta1, beta2, eps = cast(beta1), cast(beta2), cast(eps)
        for tile in self._tiles(data.size, 1):
            g, m_tile, v_tile, data_tile = grad[tile], m[tile], v[tile], data[tile]
            part = self._buffer("first", g.shape)
            np.multiply(g, rest1, out=part)
            m_tile *= beta1
            m_tile += part
            np.multiply(g, g, out=part)
            part *= rest2
            v_tile *= beta2
            v_tile += part
            np.sqrt(v_tile, out=part)
            part *= root
            part += eps
            np.divide(m_tile, part, out=part)
            part *= rate
            data_tile *= decay
            data_tile -= part
            if copy is not None:
                copy[tile] = data_tile
