"""The elementwise chains of the layers as single loops, compiled by Numba (the extra `cpu`).

Only `numba_ops` imports this, on request. Each chain is one pass over memory instead of one per
operator, on the thread that calls it. Results go to arrays that the caller allocates. Letters and
formulas as in `array_ops`.

NaN and infinity keep their meaning. Only two of LLVM's relaxations are allowed: sums may be
reordered, and a product and a sum may be rounded once.
"""

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from mpipar.ops.array_ops import GELU_A, GELU_B
from mpipar.ops.numpy_ops import ROW_RUN, RUN
from mpipar.ops.signature import Array, Method

ROUND_ONCE, REORDER = {"contract"}, {"contract", "reassoc", "nsz"}
# ln 2 in two parts; the first has 15 bits, so that a whole number n <= 1074 times it is exact.
LN2_HIGH = 22713 / 32768
LN2_LOW = 1.4286068203094173e-06


def compiled(relaxed: set[str], inline: Any = "never") -> Callable[[Method], Method]:
    """Return the decorator of a kernel, or of what is inlined into kernels ("always").

    Compiled code is cached on disk only if `numba_ops` found a folder for it. Numba's own choice
    would be the folder of this package.
    """
    settings: Any = numba.config
    njit: Any = numba.njit
    decorator: Callable[[Method], Method] = njit(
        error_model="numpy",
        fastmath=relaxed,
        nogil=True,
        inline=inline,
        cache=bool(settings.CACHE_DIR),
    )
    return decorator


def exp(x: Any) -> Any:
    """Return exp(x) of a scalar. Compiled code gets `_exp`, for x that is negative, 0 or tiny."""
    return math.exp(x)


@overload(exp, jit_options={"fastmath": ROUND_ONCE, "error_model": "numpy"})
def _exp(x: Any) -> Callable[[Any], Any]:
    if x == types.float32:
        return _polynomial_exp(np.float32, np.int32, terms=8, smallest=-87, bits=23, bias=127)
    return _polynomial_exp(np.float64, np.int64, terms=14, smallest=-708, bits=52, bias=1023)


def _polynomial_exp(
    real: Any, whole: Any, terms: int, smallest: int, bits: int, bias: int
) -> Callable[[Any], Any]:
    """Return exp(x) = 2^n exp(r), r = x - n ln 2, by the series up to r^(terms - 1).

    LLVM vectorises the series, but not a call of the library's exp. The omitted terms are below the
    rounding error of the result. The result is 0 if exp(x) is not a normal number.
    """
    series = tuple(real(1 / math.factorial(k)) for k in reversed(range(terms)))
    per_ln2, high, low = real(1 / math.log(2)), real(LN2_HIGH), real(LN2_LOW)
    half, zero, smallest = real(0.5), real(0), real(smallest)
    bits, bias = whole(bits), whole(bias)

    def implementation(x: Any) -> Any:
        n = math.floor(x * per_ln2 + half) if x >= smallest else zero  # NaN would give no exponent
        n = real(n)
        r = x - n * high
        r = r - n * low
        y = zero
        for factor in series:
            y = y * r + factor
        y = y * whole((whole(n) + bias) << bits).view(real)
        return zero if x < smallest else y

    return implementation


# GELU: (1 + tanh u) / 2 is the logistic function s of 2u, and its slope s (1 - s) 2u'.


@compiled(ROUND_ONCE)
def gelu_forward(x: Array, y: Array) -> None:
    """Write x s to y; both flat."""
    a, b = x.dtype.type(2.0 * GELU_A), x.dtype.type(2.0 * GELU_B)
    one = x.dtype.type(1.0)
    for i in range(x.size):
        e = exp(-abs(x[i] * (a + b * x[i] * x[i])))
        y[i] = x[i] * (one if x[i] >= 0 else e) / (one + e)


@compiled(ROUND_ONCE)
def gelu_backward_input(dy: Array, x: Array, dx: Array) -> None:
    """Write dy (s + x s (1 - s) 2u') to dx; all flat."""
    a, b = x.dtype.type(2.0 * GELU_A), x.dtype.type(2.0 * GELU_B)
    b3, one = x.dtype.type(6.0 * GELU_B), x.dtype.type(1.0)
    for i in range(x.size):
        square = x[i] * x[i]
        e = exp(-abs(x[i] * (a + b * square)))
        part = one / (one + e)
        s = part if x[i] >= 0 else e * part
        dx[i] = dy[i] * (s + x[i] * (e * part * part) * (a + b3 * square))


# SwiGLU, silu(g) = g s(g), and rotary positions.


@compiled(ROUND_ONCE)
def swiglu_forward(h: Array, y: Array) -> None:
    """Write silu(gate) up to y (N, F); h (N, 2, F)."""
    one = h.dtype.type(1.0)
    for i in range(h.shape[0]):
        for j in range(h.shape[2]):
            g = h[i, 0, j]
            e = exp(-abs(g))
            y[i, j] = g * (one if g >= 0 else e) / (one + e) * h[i, 1, j]


@compiled(ROUND_ONCE)
def swiglu_backward_input(dy: Array, h: Array, dh: Array, y: Array) -> None:
    """Write the gradient of h (N, 2, F) to dh, and silu(gate) up to y (N, F)."""
    one = h.dtype.type(1.0)
    for i in range(h.shape[0]):
        # LLVM vectorises a loop only if a few comparisons show that its arrays do not overlap. This
        # is why there are two loops, the second of which recomputes the exponential.
        gate, up, dgate, dup = h[i, 0], h[i, 1], dh[i, 0], dh[i, 1]
        for j in range(h.shape[2]):
            e = exp(-abs(gate[j]))
            part = one / (one + e)
            silu = gate[j] * (one if gate[j] >= 0 else e) * part
            dup[j] = dy[i, j] * silu
            y[i, j] = silu * up[j]
        for j in range(h.shape[2]):
            e = exp(-abs(gate[j]))
            part = one / (one + e)
            s = (one if gate[j] >= 0 else e) * part
            dgate[j] = dy[i, j] * up[j] * (s + gate[j] * (e * part * part))


@compiled(ROUND_ONCE)
def rotate(x: Array, cos: Array, sin: Array) -> None:
    """Rotate the points of x (B, T, H, d) in place; cos and sin (B, T, d/2)."""
    half = cos.shape[2]
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for head in range(x.shape[2]):
                for i in range(half):
                    first, second = x[b, t, head, i], x[b, t, head, half + i]
                    c, s = cos[b, t, i], sin[b, t, i]
                    x[b, t, head, i] = first * c - second * s
                    x[b, t, head, half + i] = second * c + first * s


# Norms. RMSNorm is a LayerNorm whose rows have mean 0, which is passed as None.


@compiled(REORDER)
def _mean(row: Array, squared: bool) -> Any:
    """Return the mean of row (D,) or of its squares, added up in runs: errors grow with length."""
    total = row.dtype.type(0.0)
    for start in range(0, row.size, RUN):
        some, part = row[start : start + RUN], row.dtype.type(0.0)
        for j in range(some.size):
            part += some[j] * some[j] if squared else some[j]
        total += part
    return total / row.dtype.type(row.size)


@compiled(ROUND_ONCE)
def rmsnorm_forward(x: Array, w: Array, eps: float, y: Array, rstd: Array) -> None:
    """Write x rstd w to y (N, D), and rstd (N,)."""
    for i in range(x.shape[0]):
        r = x.dtype.type(1.0) / np.sqrt(_mean(x[i], True) + eps)
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * r * w[j]
        rstd[i] = r


@compiled(ROUND_ONCE)
def layernorm_forward(
    x: Array, w: Array, b: Array, eps: float, y: Array, mean: Array, rstd: Array
) -> None:
    """Normalise and scale the rows of x (N, D) into y; mean and rstd (N,).

    x - first is stored, so that no sum can be reordered across it.
    """
    for i in range(x.shape[0]):
        first = x[i, 0]
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] - first
        m = _mean(y[i], False)
        for j in range(x.shape[1]):
            y[i, j] -= m
        r = x.dtype.type(1.0) / np.sqrt(_mean(y[i], True) + eps)
        for j in range(x.shape[1]):
            y[i, j] = y[i, j] * r * w[j] + b[j]
        mean[i], rstd[i] = first + m, r


@compiled(REORDER)
def layernorm_backward_input(
    dy: Array,
    x: Array,
    w: Array,
    mean: Array | None,
    rstd: Array,
    around: Array | None,
    dx: Array,
) -> None:
    """Write rstd (g - mean(g) - xhat mean(g xhat)), g = dy w, to dx (N, D).

    Without a mean of x, mean(g) is left out. around: what is added, if given.
    """
    width, zero = x.dtype.type(x.shape[1]), x.dtype.type(0.0)
    for i in range(x.shape[0]):
        m, r = zero if mean is None else mean[i], rstd[i]
        level = slope = zero
        for j in range(x.shape[1]):
            g = dy[i, j] * w[j]
            level += g
            slope += g * ((x[i, j] - m) * r)
        level, slope = zero if mean is None else level / width, slope / width
        for j in range(x.shape[1]):
            dx[i, j] = r * (dy[i, j] * w[j] - level - (x[i, j] - m) * r * slope)
        if around is not None:
            for j in range(x.shape[1]):
                dx[i, j] += around[i, j]


@compiled(REORDER)
def rmsnorm_backward_input(
    dy: Array, x: Array, w: Array, rstd: Array, around: Array | None, dx: Array
) -> None:
    """Write rstd (g - xhat mean(g xhat)), g = dy w, to dx (N, D)."""
    layernorm_backward_input(dy, x, w, None, rstd, around, dx)


@compiled(ROUND_ONCE)
def layernorm_backward_weight(
    dy: Array, x: Array, mean: Array | None, rstd: Array, dw: Array, db: Array
) -> None:
    """Add the sum of dy xhat to dw (D,) and the sum of dy to db (D,)."""
    part_dw, part_db = np.empty_like(dw), np.empty_like(dw)
    for start in range(0, x.shape[0], ROW_RUN):
        part_dw[:], part_db[:] = 0, 0
        for i in range(start, min(start + ROW_RUN, x.shape[0])):
            m, r = x.dtype.type(0.0) if mean is None else mean[i], rstd[i]
            for j in range(x.shape[1]):
                part_dw[j] += dy[i, j] * ((x[i, j] - m) * r)
                part_db[j] += dy[i, j]
        dw += part_dw
        db += part_db


@compiled(ROUND_ONCE)
def rmsnorm_backward_weight(dy: Array, x: Array, rstd: Array, dw: Array) -> None:
    """Add the sum of dy xhat to dw (D,)."""
    layernorm_backward_weight(dy, x, None, rstd, dw, np.zeros_like(dw))


# Softmax. The maximum of a row comes from NumPy, whose maximum is vectorised and keeps NaN.


@compiled(REORDER)
def softmax(probs: Array, top: Array, total: Array, first: int, keys: int) -> None:
    """Write softmax over the leading `keys` scores in the rows from `first` of probs (H, T, T).

    top (H, n): the largest of each of these rows. total (H, n): receives its sum of
    exp(score - top). Rows are addressed in the whole array, because LLVM would not vectorise a
    strided view of it.
    """
    one = probs.dtype.type(1.0)
    for h in range(top.shape[0]):
        for i in range(top.shape[1]):
            row_sum = probs.dtype.type(0.0)
            for start in range(0, keys, RUN):
                row = probs[h, first + i, start : min(start + RUN, keys)]
                part = probs.dtype.type(0.0)
                for j in range(row.size):
                    e = exp(row[j] - top[h, i])
                    row[j] = e
                    part += e
                row_sum += part
            factor = one / row_sum if row_sum != 0 else one  # 0: every key is hidden
            for j in range(keys):
                probs[h, first + i, j] *= factor
            total[h, i] = row_sum


@compiled(REORDER)
def softmax_backward(dprobs: Array, probs: Array, first: int) -> None:
    """Write dscores over dprobs (H, n, keys), of the rows from `first` of probs (H, T, T)."""
    for h in range(dprobs.shape[0]):
        for i in range(dprobs.shape[1]):
            total = probs.dtype.type(0.0)
            for j in range(dprobs.shape[2]):
                total += dprobs[h, i, j] * probs[h, first + i, j]
            for j in range(dprobs.shape[2]):
                p = probs[h, first + i, j]
                dprobs[h, i, j] = (dprobs[h, i, j] - total) * p


@compiled(REORDER)
def exp_sum(logits: Array, top: Array, total: Array) -> None:
    """Write the sum of exp(logit - top) of each row of logits (N, V) to total (N,)."""
    for i in range(logits.shape[0]):
        row = logits.dtype.type(0.0)
        for start in range(0, logits.shape[1], RUN):
            some, part = logits[i, start : start + RUN], logits.dtype.type(0.0)
            for j in range(some.size):
                part += exp(some[j] - top[i])
            row += part
        total[i] = row


@compiled(ROUND_ONCE)
def scaled_softmax(logits: Array, sums: Array, scale: float) -> None:
    """Write exp(logit - maximum) / sum scale over logits (N, V); both numbers: sums (N, 2)."""
    for i in range(logits.shape[0]):
        top, factor = sums[i, 0], scale / sums[i, 1]
        for j in range(logits.shape[1]):
            logits[i, j] = exp(logits[i, j] - top) * factor


@compiled(ROUND_ONCE)
def adamw_step(
    data: Array,
    grad: Array,
    m: Array,
    v: Array,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    root: float,
    rate: float,
) -> None:
    """Update data, m, v (flat): decay = 1 - lr * weight_decay, root and rate: bias correction."""
    one = data.dtype.type(1.0)
    for i in range(data.size):
        g = grad[i]
        m[i] = beta1 * m[i] + (one - beta1) * g
        v[i] = beta2 * v[i] + (one - beta2) * (g * g)
        data[i] = decay * data[i] - rate * m[i] / (np.sqrt(v[i]) * root + eps)
