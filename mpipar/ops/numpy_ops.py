"""The array functions tuned for the CPU: the arithmetic of `array_ops` in tiles that stay in cache.

What an elementwise chain costs on a CPU is its temporaries, so each chain runs over a tile of rows
with `out=` and in-place operators, the next tile after it. Attention works on strided views of the
packed arrays (BLAS takes them as they are) and leaves out the products that the causal mask hides.
Buffers belong to the object and are bounded by a tile. Letters as in `array_ops`.
"""

import numpy as np

from mpipar.ops.array_ops import GELU_A, GELU_B, ArrayOps, _rows

# Elements of a tile: 170 rows of 384. Two or three float32 tiles fit a 1 MiB L2 cache; 2^14 is 20 %
# slower (interpreter time), 2^18 gains nothing where the L3 cache is large and loses where it is not.
TILE = 1 << 16
# Query rows of an attention tile. 64 and 128 are equal within 5 %; 256 (no tiles at T = 256) computes
# the hidden triangle and takes 10 % longer forward, 30 % longer backward.
QUERY_TILE = 64
# Elements of the scratch buffer through which a product is added to a weight gradient.
PRODUCT_TILE = 1 << 20


class NumpyOps(ArrayOps):
    """The array functions of `ArrayOps` on NumPy."""

    def __init__(self, dtype):
        super().__init__(np, dtype, "cpu")
        self._buffers = {}

    def _buffer(self, name, shape):
        """Return an uninitialised array that the next call with this name overwrites."""
        size = int(np.prod(shape))
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

    def matmul_backward_weight(self, x, dy, dw):
        """Add x^T dy to dw: (..., K) and (..., M) give (K, M); dw may be a transposed view.

        NumPy cannot make BLAS add to its output, so the product goes through a scratch buffer, in
        blocks of rows of dw: the added pass reads it from cache (0.05 ms after a product of 9 ms).
        """
        assert dw.shape == (x.shape[-1], dy.shape[-1]), (dw.shape, x.shape, dy.shape)
        left, right = _rows(x), _rows(dy)
        if dw.strides[0] < dw.strides[1]:  # the gradient of a tied table: (x^T dy)^T = dy^T x
            left, right, dw = right, left, dw.T
        step = max(QUERY_TILE, PRODUCT_TILE // max(1, dw.shape[1]))
        for first in range(0, dw.shape[0], step):
            block = dw[first : first + step]
            product = self._buffer("product", block.shape)
            np.matmul(left[:, first : first + step].T, right, out=product)
            block += product

    def bias_backward_weight(self, dy, db):
        """Add the sum of dy (..., M) over its leading dimensions to db (M,)."""
        assert dy.shape[-1:] == db.shape, (dy.shape, db.shape)
        rows = _rows(dy)
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

    # LayerNorm.

    def layernorm_forward(self, x, w, b, eps):
        """Return (y, mean, rstd): x (..., D) normalised and scaled, mean and rstd (...)."""
        y = np.empty(x.shape, self.dtype)
        mean, rstd = np.empty(x.shape[:-1], self.dtype), np.empty(x.shape[:-1], self.dtype)
        x_rows, y_rows, mean_flat, rstd_flat = _rows(x), _rows(y), mean.ravel(), rstd.ravel()
        width = self.scalar(x.shape[-1])
        average = self._ones(x.shape[-1]) / width
        for tile in self._tiles(*x_rows.shape):
            out, m, r = y_rows[tile], mean_flat[tile], rstd_flat[tile]
            np.matmul(x_rows[tile], average, out=m)
            np.subtract(x_rows[tile], m[:, None], out=out)
            np.vecdot(out, out, out=r)
            r /= width
            r += self.scalar(eps)
            np.sqrt(r, out=r)
            np.reciprocal(r, out=r)
            out *= r[:, None]
            out *= w
            out += b
        return y, mean, rstd

    def layernorm_backward_input(self, dy, x, w, mean, rstd):
        """Return dx = rstd (g - mean(g) - xhat mean(g xhat)), where g = dy w."""
        dx = np.empty(x.shape, self.dtype)
        dy_rows, x_rows, dx_rows = _rows(dy), _rows(x), _rows(dx)
        mean, rstd = mean.reshape(-1, 1), rstd.reshape(-1, 1)
        width = self.scalar(x.shape[-1])
        average = self._ones(x.shape[-1]) / width
        for tile in self._tiles(*x_rows.shape):
            xhat, r = dx_rows[tile], rstd[tile]
            g = self._buffer("first", xhat.shape)
            np.subtract(x_rows[tile], mean[tile], out=xhat)
            xhat *= r
            np.multiply(dy_rows[tile], w, out=g)
            g_mean = g @ average
            slope = np.vecdot(g, xhat)
            slope /= width
            xhat *= slope[:, None]
            np.subtract(g, xhat, out=xhat)
            xhat -= g_mean[:, None]
            xhat *= r
        return dx

    def layernorm_backward_weight(self, dy, x, mean, rstd, dw, db):
        """Add the sum of dy xhat to dw (D,) and the sum of dy to db (D,)."""
        dy_rows, x_rows = _rows(dy), _rows(x)
        mean, rstd = mean.reshape(-1, 1), rstd.reshape(-1)
        for tile in self._tiles(*x_rows.shape):
            part = self._buffer("first", x_rows[tile].shape)
            np.subtract(x_rows[tile], mean[tile], out=part)
            part *= dy_rows[tile]
            dw += rstd[tile] @ part  # the factor rstd of each row comes with the sum over rows
        self.bias_backward_weight(dy, db)

    # Attention.

    def attention_forward(self, qkv, positions):
        """Return (y, probs) of causal attention.

        qkv (B, T, 3, H, d), positions (T,); y (B, T, H, d), probs (B, H, T, T), hidden part 0.
        """
        batch, tokens, _, heads, width = qkv.shape
        y = np.empty((batch, tokens, heads, width), self.dtype)
        probs = np.empty((batch, heads, tokens, tokens), self.dtype)
        factor, ones = self.scalar(width**-0.5), self._ones(tokens)
        tiles = self._query_tiles(positions)
        hide = [self._hidden(positions, tile, keys) for tile, keys in tiles]
        for one in range(batch):
            q, k, v = (qkv[one, :, i].transpose(1, 0, 2) for i in range(3))  # (H, T, d)
            y_heads = y[one].transpose(1, 0, 2)
            for (tile, keys), (first, minus_inf) in zip(tiles, hide, strict=True):
                probs[one, :, tile, keys:] = 0
                p = probs[one, :, tile, :keys]
                scaled = self._buffer("query", q[:, tile].shape)
                np.multiply(q[:, tile], factor, out=scaled)
                np.matmul(scaled, k[:, :keys].transpose(0, 2, 1), out=p)
                p[..., first:] += minus_inf
                p -= p.max(axis=-1, keepdims=True)
                np.exp(p, out=p)
                p *= np.reciprocal(p @ ones[:keys])[..., None]
                np.matmul(p, v[:, :keys], out=y_heads[:, tile])
        return y, probs

    def attention_backward_input(self, dy, qkv, probs, positions):
        """Return dqkv (B, T, 3, H, d); of a row, dscores = probs (dprobs - sum(probs dprobs))."""
        dqkv = np.empty(qkv.shape, self.dtype)
        for one in range(len(qkv)):
            q, k, v = (qkv[one, :, i].transpose(1, 0, 2) for i in range(3))  # (H, T, d)
            dq, dk, dv = (dqkv[one, :, i].transpose(1, 0, 2) for i in range(3))
            dy_heads = dy[one].transpose(1, 0, 2)
            # From the last tile on: it sees every key, so its products start dk and dv.
            for tile, keys in reversed(self._query_tiles(positions)):
                p, g = probs[one, :, tile, :keys], dy_heads[:, tile]
                ds = self._buffer("scores", p.shape)
                np.matmul(g, v[:, :keys].transpose(0, 2, 1), out=ds)
                ds -= np.vecdot(ds, p)[..., None]
                ds *= p
                np.matmul(ds, k[:, :keys], out=dq[:, tile])
                last = tile.stop == len(positions)
                for left, right, out in ((p, g, dv), (ds, q[:, tile], dk)):
                    if last:
                        np.matmul(left.transpose(0, 2, 1), right, out=out)
                        continue
                    part = self._buffer("keys", out[:, :keys].shape)
                    np.matmul(left.transpose(0, 2, 1), right, out=part)
                    out[:, :keys] += part
        dqkv[:, :, :2] *= self.scalar(qkv.shape[-1] ** -0.5)
        return dqkv

    @staticmethod
    def _query_tiles(positions):
        """Return (slice of queries, number of keys from the first on that some of them see)."""
        tokens = len(positions)
        increasing = bool(np.all(positions[1:] > positions[:-1]))  # then query i sees keys 0..i
        stops = [min(first + QUERY_TILE, tokens) for first in range(0, tokens, QUERY_TILE)]
        return [
            (slice(stop - 1 - (stop - 1) % QUERY_TILE, stop), stop if increasing else tokens)
            for stop in stops
        ]

    def _hidden(self, positions, tile, keys):
        """Return (first key that a query of the tile may not see, -inf where it does not, else 0)."""
        first = tile.start if keys == tile.stop else 0
        visible = positions[None, first:keys] <= positions[tile, None]
        return first, np.where(visible, self.scalar(0.0), self.scalar(-np.inf))

    # Embeddings.

    def embedding_backward_weight(self, ids, dy, dtable, start):
        """Add each row of dy (..., D) to the row of dtable of its id, if this shard holds it."""
        local = (ids - start).reshape(-1).tolist()
        for row, dy_row in zip(local, _rows(dy), strict=True):  # 5 times faster than np.add.at
            if 0 <= row < len(dtable):
                dtable[row] += dy_row

    def position_backward_weight(self, positions, dy, dtable):
        """Add the batch sum of dy (B, T, D) to the rows `positions` of dtable."""
        self.embedding_backward_weight(positions, dy.sum(axis=0), dtable, 0)
