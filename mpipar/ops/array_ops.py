"""Every array function of the layers written plainly, for NumPy and CuPy alike.

These formulas are what runs: CuPy takes the arrays whole, NumPy a tile of rows at a time
(`numpy_tiles`). A formula may work in place on its own temporaries. It changes no argument unless
it says so. Results are new C-contiguous arrays, unless the text says otherwise.

`name_forward` computes. `name_backward_input` gives the gradient of the input.
`name_backward_weight` ADDS the gradient of a parameter to the array it is given. Products have
BLAS's letters: `n` an operand as it is, `t` its transpose.

B batch, T tokens, N tokens of a microbatch (B*T). D model width, H heads, d = D/H. V vocabulary
(here the columns of one shard). K and M the inner and outer width of a product.
"""

import math

import numpy as np

from mpipar.ops.array_attention import ArrayAttention
from mpipar.ops.image_ops import ImageOps
from mpipar.ops.llama_ops import LlamaOps
from mpipar.ops.loss_ops import LossOps

# GELU, tanh form: 0.5 x (1 + tanh(GELU_A x + GELU_B x^3)); arXiv 1606.08415.
GELU_A = math.sqrt(2.0 / math.pi)
GELU_B = 0.044715 * GELU_A
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: its multiples are spread evenly


class ArrayOps(ArrayAttention, LlamaOps, LossOps, ImageOps):
    """The array functions over `xp` (the module numpy or cupy) in one floating-point type."""

    takes_16_bits = ()  # functions that compute on 16-bit operands as they are, summing in float32
    checksum_block = 1 << 16  # 32-bit words that a checksum takes at once, widened to 64 bits
    tiled_head_width = 0  # widest head whose attention keeps a number per query, not its scores

    def __init__(self, xp, dtype, device):
        self.xp = xp
        self.dtype = self.statistics = np.dtype(dtype)  # of activations; of gradients and sums
        self.device = device
        # A NumPy float64 scalar would widen a float32 array (NEP 50): every scalar is cast by this.
        self.scalar = self.dtype.type

    # Memory. `label` says what the bytes are for; only the shape implementation counts them.

    def empty(self, shape, dtype=None, label="stash"):
        """Return an uninitialised array."""
        return self.xp.empty(shape, self.dtype if dtype is None else dtype)

    def zeros(self, shape, dtype=None, label="stash"):
        """Return an array of zeros."""
        return self.xp.zeros(shape, self.dtype if dtype is None else dtype)

    def asarray(self, host):
        """Return a host array as an array of this device, same type (CPU: the same memory)."""
        return self.xp.asarray(host)

    def to_host(self, x):
        """Return x as a NumPy array (on the CPU: x itself)."""
        return x

    def pinned(self, shape, dtype):
        """Return an uninitialised host array from which copies to the device run fastest."""
        return np.empty(shape, dtype)

    def to_pinned(self, x):
        """Return x in such a host array (on the CPU: x itself)."""
        return self.to_host(x)

    def synchronize(self):
        """Wait until everything queued on the device is done (on the CPU: nothing is queued)."""

    def fill(self, x, value):
        """Set every element of x to value."""
        x[...] = self.scalar(value)

    def copy(self, dst, src):
        """Copy src over dst; both have the same shape."""
        assert dst.shape == src.shape, (dst.shape, src.shape)
        dst[...] = src

    def scale(self, x, factor):
        """Multiply x by a number in place and return it."""
        x *= self.scalar(factor)
        return x

    def accumulate(self, x, y):
        """Add y to x in place and return x; both have the same shape."""
        assert x.shape == y.shape, (x.shape, y.shape)
        x += y
        return x

    def add_parts(self, parts):
        """Return the sum of parts (P, ...) over its first dimension."""
        return parts.sum(axis=0)

    def sum(self, x):
        """Return the sum of x as a host float, accumulated in float64."""
        return float(x.sum(dtype=np.float64))

    def square_sum(self, x):
        """Return the sum of squares of x as a host float, accumulated in float64."""
        return float(self.xp.square(x.astype(np.float64)).sum())

    def checksum(self, x):
        """Return a 64-bit number of the bits of x, another one if any single element differs.

        Word i of each block of 32-bit words is multiplied by odd number i, modulo 2^64: no change
        of one word can give 0. The odd numbers are irregular, so that several changes do not cancel
        out (multilinear hashing, Carter and Wegman 1979). Words of 16-bit numbers have 16 bits.
        """
        words, total = x.reshape(-1).view(np.uint16 if x.itemsize == 2 else np.uint32), 0
        odd = self.xp.arange(1, 1 + min(words.size, self.checksum_block), dtype=np.uint64)
        odd *= np.uint64(GOLDEN)
        odd ^= odd >> np.uint64(29)
        odd |= np.uint64(1)
        for first in range(0, words.size, self.checksum_block):
            block = words[first : first + self.checksum_block]
            total = total * GOLDEN + int((block * odd[: block.size]).sum())
        return total % 2**64

    # Sums along one dimension; the functions below use them.

    def _row_sums(self, x):
        """Return the sum of each row of x (..., D)."""
        return x.sum(axis=-1)

    def _row_dots(self, x, y):
        """Return the sum of each row of x y, both (..., D)."""
        return (x * y).sum(axis=-1)

    def _column_sums(self, x, factors=None):
        """Return the sum (D,) over the rows of x (..., D), each times its factor (...)."""
        rows = as_rows(x)
        if factors is not None:
            rows = rows * factors.reshape(-1, 1)
        return rows.sum(axis=0)

    # Products. Of y = x w, dx = dy w^T is `matmul_nt` and dw += x^T dy is `matmul_tn_add`.

    def matmul(self, x, w):
        """Return x w: (..., K) times (K, M) gives (..., M)."""
        return (as_rows(x) @ w).reshape(*x.shape[:-1], w.shape[1])

    def matmul_nt(self, x, w):
        """Return x w^T: (..., M) and (K, M) give (..., K)."""
        return (as_rows(x) @ w.T).reshape(*x.shape[:-1], w.shape[0])

    def matmul_tn_add(self, x, y, out):
        """Add x^T y to out: (..., K) and (..., M) give (K, M); out may be a transposed view."""
        assert out.shape == (x.shape[-1], y.shape[-1]), (out.shape, x.shape, y.shape)
        out += as_rows(x).T @ as_rows(y)

    def bias_forward(self, y, b):
        """Add b (M,) to the freshly made y (..., M) in place and return y."""
        assert y.shape[-1:] == b.shape, (y.shape, b.shape)
        y += b
        return y

    def bias_backward_weight(self, dy, db):
        """Add the sum of dy (..., M) over its leading dimensions to db (M,)."""
        assert dy.shape[-1:] == db.shape, (dy.shape, db.shape)
        db += self._column_sums(dy)

    # Elementwise chains. One temporary, on which a chain works in place, is what makes them fast:
    # it is the result, and `out` says where it lies. x * x * x, never x**3: a power is computed
    # through logarithms, 70 times slower.

    def gelu_forward(self, x, out=None):
        """Return the tanh form of GELU of x: 0.5 x (1 + tanh(x (A + B x^2)))."""
        y = self.xp.multiply(x, x, out=out)
        y *= GELU_B
        y += GELU_A
        y *= x
        self.xp.tanh(y, out=y)
        y += 1.0
        y *= x
        y *= 0.5
        return y

    def gelu_backward_input(self, dy, x, out=None):
        """Return dx = dy GELU'(x): with t = tanh(u), that is 0.5 (1 + t) (1 + (1 - t) x u')."""
        slope = x * x  # in the end x u'
        t = slope * GELU_B
        t += GELU_A
        t *= x
        self.xp.tanh(t, out=t)
        slope *= 3.0 * GELU_B
        slope += GELU_A
        slope *= x
        dx = self.xp.subtract(1.0, t, out=out)
        dx *= slope
        dx += 1.0
        t += 1.0
        dx *= t
        dx *= 0.5
        dx *= dy
        return dx

    def bias_gelu_forward(self, x, b):
        """Add b (M,) to the freshly made x (..., M) in place and return GELU of the sum."""
        return self.gelu_forward(self.bias_forward(x, b))

    # Norms over the last dimension. LayerNorm is RMSNorm of x - mean, plus b.

    def rmsnorm_forward(self, x, w, eps, out=None):
        """Return (y, rstd): x (..., D) times rstd = 1 / sqrt(mean(x^2) + eps), scaled; rstd (...).

        Zhang and Sennrich 2019, arXiv 1910.07467.
        """
        square = self._row_dots(x, x) / self.scalar(x.shape[-1])
        rstd = self.scalar(1.0) / self.xp.sqrt(square + self.scalar(eps))
        y = self.xp.multiply(x, rstd[..., None], out=out)
        y *= w
        return y, rstd

    def rmsnorm_backward_input(self, dy, x, w, rstd, out=None):
        """Return dx = rstd (g - xhat mean(g xhat)), where g = dy w and xhat = x rstd."""
        g = dy * w
        dx = self.xp.multiply(x, rstd[..., None], out=out)  # xhat
        slope = self._row_dots(g, dx) / self.scalar(x.shape[-1])
        dx *= slope[..., None]
        self.xp.subtract(g, dx, out=dx)
        dx *= rstd[..., None]
        return dx

    def rmsnorm_backward_weight(self, dy, x, rstd, dw):
        """Add the sum of dy xhat to dw (D,)."""
        dw += self._column_sums(dy * x, rstd)

    def layernorm_forward(self, x, w, b, eps, out=None):
        """Return (y, mean, rstd): x (..., D) normalised and scaled, mean and rstd (...)."""
        mean = self._row_sums(x) / self.scalar(x.shape[-1])
        y = self.xp.subtract(x, mean[..., None], out=out)
        _, rstd = ArrayOps.rmsnorm_forward(self, y, w, eps, out=y)
        y += b
        return y, mean, rstd

    def layernorm_backward_input(self, dy, x, w, mean, rstd, out=None):
        """Return dx = c - mean(c), where c is the gradient of x - mean."""
        c = self.xp.subtract(x, mean[..., None], out=out)
        ArrayOps.rmsnorm_backward_input(self, dy, c, w, rstd, out=c)
        c -= (self._row_sums(c) / self.scalar(x.shape[-1]))[..., None]
        return c

    def layernorm_backward_weight(self, dy, x, mean, rstd, dw, db):
        """Add the sum of dy xhat to dw (D,) and the sum of dy to db (D,)."""
        part = x - mean[..., None]
        part *= dy
        dw += self._column_sums(part, rstd)
        db += self._column_sums(dy)

    # Embeddings. A table shard holds the rows of the ids [start, start + rows).

    def embedding_forward(self, ids, table, start):
        """Return table[ids - start] (..., D), zeros where an id belongs to another shard."""
        local, inside = self._local_rows(ids, start, table.shape[0])
        y = table[local]
        y[~inside] = self.scalar(0.0)
        return y

    def embedding_backward_weight(self, ids, dy, dtable, start):
        """Add each row of dy (..., D) to the row of dtable of its id, if this shard holds it."""
        local, inside = self._local_rows(ids, start, dtable.shape[0])
        self.xp.add.at(dtable, local[inside], dy[inside])

    def _local_rows(self, ids, start, rows):
        """Return (row numbers, 0 where outside; whether the shard holds the id)."""
        local = ids - start
        inside = (local >= 0) & (local < rows)
        return self.xp.where(inside, local, 0), inside

    def position_forward(self, x, positions, table):
        """Return x (B, T, D) + table[positions]."""
        return x + table[positions]

    def position_backward_weight(self, positions, dy, dtable):
        """Add the batch sum of dy (B, T, D) to the rows `positions` of dtable."""
        self.xp.add.at(dtable, positions, dy.sum(axis=0))

    # Updates of flat buffers in place.

    def sgd_step(self, data, grad, lr):
        """Subtract lr * grad from data."""
        data -= self.scalar(lr) * grad

    def adamw_step(
        self, data, grad, m, v, *, lr, beta1, beta2, eps, weight_decay, step, copy=None
    ):
        """Update data, m, v in place; step counts from 1. copy: gets the new data, rounded.

        Decay is apart from the gradient, and eps is outside the root. Source: Loshchilov and
        Hutter, arXiv 1711.05101.
        """
        cast = self.scalar
        part = grad * cast(1.0 - beta1)
        m *= cast(beta1)
        m += part
        self.xp.multiply(grad, grad, out=part)
        part *= cast(1.0 - beta2)
        v *= cast(beta2)
        v += part
        self.xp.sqrt(v, out=part)
        part *= cast((1.0 - beta2**step) ** -0.5)
        part += cast(eps)
        self.xp.divide(m, part, out=part)
        part *= cast(lr / (1.0 - beta1**step))
        data *= cast(1.0 - lr * weight_decay)
        data -= part
        if copy is not None:
            self.copy(copy, data)

    def adamw_runs(
        self, data, grad, m, v, runs, *, lr, beta1, beta2, eps, weight_decay, step, copy=None
    ):
        """Update flat buffers as `adamw_step` does; weights of some parts do not decay.

        runs: (whether its weights decay, slice) of each part of the buffers.
        """
        for decays, run in runs:
            self.adamw_step(
                data[run], grad[run], m[run], v[run], lr=lr, beta1=beta1, beta2=beta2, eps=eps,
                weight_decay=weight_decay if decays else 0.0, step=step,
                copy=None if copy is None else copy[run])


def as_rows(x):
    """Return x (..., K) as a matrix (rows, K)."""
    return x.reshape(-1, x.shape[-1])
