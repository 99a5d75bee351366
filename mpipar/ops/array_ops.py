"""Every array function of the layers written plainly, for NumPy and CuPy alike.

This is the readable version: the oracle of the tests and what runs on CuPy. `name_forward`
computes, `name_backward_input` gives the gradient of the input, `name_backward_weight` ADDS the
gradient of a parameter to the array it is given. Products have BLAS's letters: `n` an operand as it
is, `t` its transpose. Results are new C-contiguous arrays or say so.
B batch, T tokens, D model width, H heads, d = D/H, V vocabulary (here the columns of one shard),
N tokens of a microbatch (B*T), K and M the inner and outer width of a product.
"""

import math

import numpy as np

from mpipar.ops.array_attention import ArrayAttention
from mpipar.ops.image_ops import ImageOps

# GELU, tanh form: 0.5 x (1 + tanh(GELU_A x + GELU_B x^3)); arXiv 1606.08415.
GELU_A = math.sqrt(2.0 / math.pi)
GELU_B = 0.044715 * GELU_A
# Stands for the maximum over no columns. Finite: (it - true maximum) is never inf - inf = NaN.
EMPTY_MAX = -1e30


class ArrayOps(ArrayAttention, ImageOps):
    """The array functions over `xp` (the module numpy or cupy) in one floating-point type."""

    takes_16_bits = ()  # functions that compute on 16-bit operands as they are, summing in float32
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

    def sum(self, x):
        """Return the sum of x as a host float, accumulated in float64."""
        return float(x.sum(dtype=np.float64))

    def square_sum(self, x):
        """Return the sum of squares of x as a host float, accumulated in float64."""
        return float(self.xp.square(x.astype(np.float64)).sum())

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
        db += as_rows(dy).sum(axis=0)

    # GELU. x * x * x, never x**3: a power is computed through logarithms, 70 times slower.

    def gelu_forward(self, x):
        """Return the tanh form of GELU of x."""
        a, b, half, one = map(self.scalar, (GELU_A, GELU_B, 0.5, 1.0))
        return half * x * (one + self.xp.tanh(x * (a + b * x * x)))

    def gelu_backward_input(self, dy, x):
        """Return dx = dy GELU'(x), where t = tanh(u): 0.5 (1 + t) + 0.5 x (1 - t^2) u'."""
        a, b, half, one, three = map(self.scalar, (GELU_A, GELU_B, 0.5, 1.0, 3.0))
        square = x * x
        t = self.xp.tanh(x * (a + b * square))
        return dy * half * ((one + t) + x * (one - t * t) * (a + three * b * square))

    def bias_gelu_forward(self, x, b):
        """Add b (M,) to the freshly made x (..., M) in place and return GELU of the sum."""
        return self.gelu_forward(self.bias_forward(x, b))

    # Norms over the last dimension. LayerNorm is RMSNorm of x - mean, plus b.

    def rmsnorm_forward(self, x, w, eps):
        """Return (y, rstd): x (..., D) times rstd = 1 / sqrt(mean(x^2) + eps), scaled; rstd (...).

        Zhang and Sennrich 2019, arXiv 1910.07467.
        """
        square = (x * x).mean(axis=-1)
        rstd = self.scalar(1.0) / self.xp.sqrt(square + self.scalar(eps))
        return x * rstd[..., None] * w, rstd

    def rmsnorm_backward_input(self, dy, x, w, rstd):
        """Return dx = rstd (g - xhat mean(g xhat)), where g = dy w and xhat = x rstd."""
        g, xhat = dy * w, x * rstd[..., None]
        slope = (g * xhat).mean(axis=-1, keepdims=True)
        return (g - xhat * slope) * rstd[..., None]

    def rmsnorm_backward_weight(self, dy, x, rstd, dw):
        """Add the sum of dy xhat to dw (D,)."""
        dw += as_rows(dy * (x * rstd[..., None])).sum(axis=0)

    def layernorm_forward(self, x, w, b, eps):
        """Return (y, mean, rstd): x (..., D) normalised and scaled, mean and rstd (...)."""
        mean = x.mean(axis=-1)
        y, rstd = self.rmsnorm_forward(x - mean[..., None], w, eps)
        return y + b, mean, rstd

    def layernorm_backward_input(self, dy, x, w, mean, rstd):
        """Return dx = c - mean(c), where c is the gradient of x - mean."""
        centered = self.rmsnorm_backward_input(dy, x - mean[..., None], w, rstd)
        return centered - centered.mean(axis=-1, keepdims=True)

    def layernorm_backward_weight(self, dy, x, mean, rstd, dw, db):
        """Add the sum of dy xhat to dw (D,) and the sum of dy to db (D,)."""
        self.rmsnorm_backward_weight(dy, x - mean[..., None], rstd, dw)
        self.bias_backward_weight(dy, db)

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

    # Loss over a vocabulary shard: columns j with start + j >= num_valid are padding, worth -inf.

    def cross_entropy_forward(self, logits, targets, start, num_valid):
        """Return stats (N, 3): maximum, sum of exp(logit - maximum), logit of the target or 0.

        logits (N, V), targets (N,) global ids below num_valid. A shard that is all padding gives
        (EMPTY_MAX, 0, 0).
        """
        valid = logits[:, : valid_columns(logits, start, num_valid)]
        stats = self.xp.zeros((logits.shape[0], 3), self.dtype)
        stats[:, 0] = self.scalar(EMPTY_MAX)
        if valid.shape[1]:
            self._max_and_sum(valid, stats)
            column, inside = self._local_rows(targets, start, valid.shape[1])
            picked = valid[self.xp.arange(len(targets)), column]
            stats[:, 2] = self.xp.where(inside, picked, self.scalar(0.0))
        return stats

    def _max_and_sum(self, valid, stats):
        """Write the maximum of each row of valid and the sum of exp(it - maximum) to stats."""
        stats[:, 0] = valid.max(axis=1)
        stats[:, 1] = self.xp.exp(valid - stats[:, :1]).sum(axis=1)

    def cross_entropy_combine(self, stats):
        """Return (loss (N,), lse (N,)) from the stats of all shards (shards, N, 3)."""
        top = stats[..., 0].max(axis=0)
        total = (stats[..., 1] * self.xp.exp(stats[..., 0] - top)).sum(axis=0)
        lse = top + self.xp.log(total)
        return lse - stats[..., 2].sum(axis=0), lse

    def cross_entropy_backward_input(self, logits, targets, lse, start, num_valid, scale):
        """Write (softmax - onehot) * scale over logits (padding: 0) and return that array."""
        columns = valid_columns(logits, start, num_valid)
        valid = logits[:, :columns]
        logits[:, columns:] = self.scalar(0.0)
        self._scaled_softmax(valid, lse, scale)
        column, inside = self._local_rows(targets, start, columns)
        rows = self.xp.nonzero(inside)[0]
        valid[rows, column[rows]] -= self.scalar(scale)  # one target a row: no index occurs twice
        return logits

    def _scaled_softmax(self, valid, lse, scale):
        """Write softmax * scale over valid."""
        valid[...] = self.xp.exp(valid - lse[:, None]) * self.scalar(scale)

    def argmax_forward(self, logits, start, num_valid, noise=None):
        """Return (N, 2) float64: the best of logits (+ noise) and its global id, the lowest."""
        valid = logits[:, : valid_columns(logits, start, num_valid)]
        best = self.xp.empty((logits.shape[0], 2), np.float64)
        best[:, 0], best[:, 1] = -np.inf, start
        if valid.shape[1]:
            score = valid if noise is None else valid + noise[:, : valid.shape[1]]
            best[:, 0] = score.max(axis=1)
            best[:, 1] += score.argmax(axis=1)
        return best

    # Updates of flat buffers in place.

    def sgd_step(self, data, grad, lr):
        """Subtract lr * grad from data."""
        data -= self.scalar(lr) * grad

    def adamw_step(
        self, data, grad, m, v, lr, beta1, beta2, eps, weight_decay, step, copy=None
    ):
        """Update data, m, v in place; step counts from 1. copy: gets the new data rounded.

        Loshchilov and Hutter, arXiv 1711.05101: decay apart from the gradient, eps outside.
        """
        cast = self.scalar
        m *= cast(beta1)
        m += cast(1.0 - beta1) * grad
        v *= cast(beta2)
        v += cast(1.0 - beta2) * (grad * grad)
        data *= cast(1.0 - lr * weight_decay)
        root = self.xp.sqrt(v) * cast((1.0 - beta2**step) ** -0.5) + cast(eps)
        data -= cast(lr / (1.0 - beta1**step)) * m / root
        if copy is not None:
            self.copy(copy, data)


def as_rows(x):
    """Return x (..., K) as a matrix (rows, K)."""
    return x.reshape(-1, x.shape[-1])


def valid_columns(logits, start, num_valid):
    """Return how many leading columns of a shard are no padding."""
    return min(max(num_valid - start, 0), logits.shape[1])
