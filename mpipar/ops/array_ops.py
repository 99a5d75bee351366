"""The formula of every array function of the layers, shared by NumPy and CuPy.

These formulas are what runs: CuPy takes whole arrays, NumPy one tile of rows at a time
(`numpy_ops`). A formula may work in place on its own temporaries. It changes no argument, and its
results are new C-contiguous arrays, unless its docstring says otherwise.

A line above each function states its shapes (`signature`): a new function is a formula with its
line.

`name_forward` computes. `name_backward_input` returns the gradient of the input.
`name_backward_weight` ADDS the gradient of a parameter to the array it is given. Products have
BLAS's letters: `n` an operand as it is, `t` its transpose.

B batch, T tokens, N tokens of a microbatch (B*T). D model width, H heads, d = D/H. V vocabulary
(here the columns of one shard). K and M the inner and outer width of a product.
"""

import math
from collections.abc import Iterator, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.ops.signature import Array, Runs, Shape, ThreeArrays, memory, shapes

if TYPE_CHECKING:
    from mpipar.ops.cupy_copies import Copies

# GELU, tanh form: 0.5 x (1 + tanh u), u = GELU_A x + GELU_B x^3; arXiv 1606.08415. It equals x
# s(2u) with the logistic function s, whose small values keep their digits; 1 + tanh u would lose
# them.
GELU_A = math.sqrt(2.0 / math.pi)
GELU_B = 0.044715 * GELU_A
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: its multiples are spread evenly


class ArrayOps:
    """The array functions over `xp` (the module numpy or cupy) in one floating-point type.

    dtype: of activations. statistics: of gradients and sums. tiled_head_width: the widest head
    whose attention keeps two numbers per query instead of its scores. table_multiple: the number of
    rows of a vocabulary table's shard is a multiple of this. Tensor cores read a matrix at full
    speed only if its rows start at multiples of 16 bytes, and they multiply it in tiles of up to
    128 rows.
    """

    # Functions that take 16-bit operands as they are, and sum in float32.
    takes_16_bits: tuple[str, ...] = ()
    checksum_block = 1 << 16  # 32-bit words that a checksum takes at once, widened to 64 bits
    tiled_head_width = 0
    table_multiple = 1
    copies: "Copies"  # those of a device, which run beside its computing stream

    def __init__(self, xp: Any, dtype: Any, device: str) -> None:
        self.xp = xp
        self.dtype = self.statistics = np.dtype(dtype)
        self.device = device
        # A NumPy float64 scalar would widen a float32 array (NEP 50), so this casts every scalar.
        self.scalar = self.dtype.type
        self.lowest = np.finfo(self.dtype).min  # the maximum of an empty set, in this type

    # Memory. `label` says what the bytes are for; only the shape implementation counts them.

    @memory
    def empty(self, shape: Shape, dtype: Any = None, label: str = "stash") -> Array:
        """Return an uninitialised array."""
        return self.xp.empty(shape, self.dtype if dtype is None else dtype)

    @memory
    def zeros(self, shape: Shape, dtype: Any = None, label: str = "stash") -> Array:
        """Return an array of zeros."""
        return self.xp.zeros(shape, self.dtype if dtype is None else dtype)

    @memory
    def asarray(self, host: np.ndarray) -> Array:
        """Return a host array as an array of this device, same type (CPU: the same memory)."""
        return self.xp.asarray(host)

    @memory
    def to_host(self, x: Array) -> np.ndarray:
        """Return x as a NumPy array (on the CPU: x itself)."""
        host: np.ndarray = x
        return host

    @memory
    def numbers(self, xs: Sequence[Any]) -> list[float]:
        """Return the results of `sum` and `square_sum` as floats of the host, all in one copy."""
        return list(map(float, xs))

    @memory
    def pinned(self, shape: Shape, dtype: Any) -> np.ndarray:
        """Return an uninitialised host array from which copies to the device run fastest."""
        return np.empty(shape, dtype)

    @memory
    def to_pinned(self, x: Array) -> np.ndarray:
        """Return x in such a host array (on the CPU: x itself)."""
        return self.to_host(x)

    @memory
    def row_counts(
        self, counts: Array, total: int, most: Shape = (), own: slice | None = None
    ) -> list[int]:
        """Return the numbers of an array, flattened, on the host; their sum is about `total`.

        On shapes, which have no numbers, `total` is distributed equally. If the worst case is
        requested, the sum is the product of `most`, which those in `own` cannot exceed and receive
        entirely.
        """
        return [int(count) for count in self.to_host(counts.reshape(-1))]

    @memory
    def block_order(self, blocks: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """Return what sorts by column the rows of blocks that are stored by row, and its inverse.

        blocks: numbers of rows of each, on the host.
        """
        sizes = np.asarray(blocks)
        starts = np.cumsum(sizes).reshape(sizes.shape) - sizes
        order = np.concatenate(
            [
                np.arange(start, start + size)
                for start, size in zip(starts.T.flat, sizes.T.flat, strict=True)
            ]
        )
        return self.asarray(order), self.asarray(np.argsort(order))

    @memory
    def synchronize(self) -> None:
        """Wait until everything queued on the device is done (on the CPU: nothing is queued)."""

    @memory
    def instant(self) -> Any:
        """Return the instant when all queued work is done: a mark on the device or (CPU) a time."""
        return perf_counter_ns()

    @memory
    def nanoseconds(self, instants: Sequence[Any]) -> list[int]:
        """Return instants as ns of the host's clock. The caller has waited for the device."""
        return list(instants)

    @shapes("x[..]+ value ->")
    def fill(self, x: Array, value: float) -> None:
        """Set every element of x to value."""
        x[...] = self.scalar(value)

    @shapes("dst[..]+ src[..] ->")
    def copy(self, dst: Array, src: Array) -> None:
        """Copy src over dst; both have the same shape."""
        assert dst.shape == src.shape, (dst.shape, src.shape)
        dst[...] = src

    @shapes("x[..]+ factor -> x")
    def scale(self, x: Array, factor: float) -> Array:
        """Multiply x by a number in place and return it."""
        x *= self.scalar(factor)
        return x

    @shapes("x[..]+ y[..] -> x")
    def accumulate(self, x: Array, y: Array) -> Array:
        """Add y to x in place and return x; both have the same shape."""
        assert x.shape == y.shape, (x.shape, y.shape)
        x += y
        return x

    @shapes("parts[P..] total[..]+? -> total[..]")
    def add_parts(self, parts: Array, total: Array | None = None) -> Array:
        """Return the sum of parts (P, ...) over its first dimension, written to total if given."""
        return parts.sum(axis=0, out=total)

    @shapes("x[..] -> total:host")
    def sum(self, x: Array) -> Any:
        """Return the sum of x, accumulated in float64, for `numbers` to read.

        It is a float or, on a device, an array () in float64, so that the host does not wait yet.
        """
        return float(x.sum(dtype=np.float64))

    @shapes("x[..] -> total:host")
    def square_sum(self, x: Array) -> Any:
        """Return the sum of squares of x, accumulated in float64; see `sum`."""
        return float(self.xp.square(x.astype(np.float64)).sum())

    @shapes("x[..] -> total:host")
    def checksum(self, x: Array) -> int:
        """Return a 64-bit number of the bits of x, which differs if any single element differs.

        Word i of each block of 32-bit words is multiplied by odd number i, modulo 2^64, so that no
        change of one word can give 0. The odd numbers are irregular, so that several changes do not
        cancel out (multilinear hashing, Carter and Wegman 1979). Words of 16-bit numbers have 16
        bits.
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

    def _row_sums(self, x: Array) -> Array:
        """Return the sum of each row of x (..., D)."""
        return x.sum(axis=-1)

    def _row_dots(self, x: Array, y: Array) -> Array:
        """Return the sum of each row of x y, both (..., D)."""
        return (x * y).sum(axis=-1)

    def _column_sums(self, x: Array, factors: Array | None = None) -> Array:
        """Return the sum (D,) over the rows of x (..., D), each multiplied by its factor (...)."""
        rows = as_rows(x)
        if factors is not None:
            rows = rows * factors.reshape(-1, 1)
        return rows.sum(axis=0)

    # Products. For y = x w, dx = dy w^T is `matmul_nt` and dw += x^T dy is `matmul_tn_add`.

    @shapes("x[..K] w[KM] -> y[..M]")
    def matmul(self, x: Array, w: Array) -> Array:
        """Return x w: (..., K) times (K, M) gives (..., M)."""
        return (as_rows(x) @ w).reshape(*x.shape[:-1], w.shape[1])

    @shapes("x[..M] w[KM] -> y[..K]")
    def matmul_nt(self, x: Array, w: Array) -> Array:
        """Return x w^T."""
        return self.matmul(x, w.T)

    @shapes("x[..K] y[..M] out[KM]+ ->")
    def matmul_tn_add(self, x: Array, y: Array, out: Array) -> None:
        """Add x^T y to out, which may be a transposed view."""
        assert out.shape == (x.shape[-1], y.shape[-1]), (out.shape, x.shape, y.shape)
        out += as_rows(x).T @ as_rows(y)

    @shapes("x[..K] w[KM] b[M]? -> y[..M]")
    def matmul_bias(self, x: Array, w: Array, b: Array | None) -> Array:
        """Return x w (..., M), plus b if there is one."""
        y = self.matmul(x, w)
        return y if b is None else self.bias_forward(y, b)

    @shapes("x[..K] y[..M] out[KM]+ sums[M]+? ->")
    def matmul_tn_add_sums(self, x: Array, y: Array, out: Array, sums: Array | None) -> None:
        """Add x^T y to out as `matmul_tn_add` does, and the sum of the rows of y to sums (M,)."""
        self.matmul_tn_add(x, y, out)
        if sums is not None:
            self.bias_backward_weight(y, sums)

    @shapes("y[..M]+ b[M] -> y")
    def bias_forward(self, y: Array, b: Array) -> Array:
        """Add b (M,) to the newly computed y (..., M) in place and return y."""
        assert y.shape[-1:] == b.shape, (y.shape, b.shape)
        y += b
        return y

    @shapes("dy[..M] db[M]+ ->")
    def bias_backward_weight(self, dy: Array, db: Array) -> None:
        """Add the sum of dy (..., M) over its leading dimensions to db (M,)."""
        assert dy.shape[-1:] == db.shape, (dy.shape, db.shape)
        db += self._column_sums(dy)

    @shapes("x[..D] y[..D] -> dots[..]:sum")
    def row_dots(self, x: Array, y: Array) -> Array:
        """Return the sum of each row of x y, both (..., D)."""
        assert x.shape == y.shape, (x.shape, y.shape)
        return self._row_dots(x, y)

    @shapes("x[..D]+ factors[..] -> x")
    def scale_rows(self, x: Array, factors: Array) -> Array:
        """Multiply each row of x (..., D) by its factor (...) in place and return x."""
        x *= factors[..., None]
        return x

    # Experts: a product for each of E experts over its own rows, which follow one another. Of R
    # rows in the order of their experts, counts says how many each expert has. Each of N tokens
    # passes K experts.

    @shapes("x[RK] w[EKM] counts -> y[RM]")
    def grouped_matmul(self, x: Array, w: Array, counts: Sequence[int]) -> Array:
        """Return x w[e] (R, M) of x (R, K) and w (E, K, M): expert e has the next counts[e] rows.

        An expert without rows is skipped.
        """
        y = self.xp.empty((len(x), w.shape[2]), x.dtype)
        for expert, rows in _groups(counts, x):
            self._multiply(x[rows], w[expert], y[rows])
        return y

    def _multiply(self, x: Array, w: Array, out: Array) -> None:
        """Write x w of x (R, K) and w (K, M) to out (R, M)."""
        out[...] = self.matmul(x, w)

    @shapes("x[RM] w[EKM] counts -> y[RK]")
    def grouped_matmul_nt(self, x: Array, w: Array, counts: Sequence[int]) -> Array:
        """Return x w[e]^T (R, K) of x (R, M) and w (E, K, M), as `grouped_matmul`."""
        return self.grouped_matmul(x, w.transpose(0, 2, 1), counts)

    @shapes("x[RK] y[RM] out[EKM]+ counts ->")
    def grouped_matmul_tn_add(self, x: Array, y: Array, out: Array, counts: Sequence[int]) -> None:
        """Add x^T y over the rows of each expert to out[e]: (R, K) and (R, M) give (E, K, M)."""
        for expert, rows in _groups(counts, x):
            self.matmul_tn_add(x[rows], y[rows], out[expert])

    @shapes("x[ND] w[ED] -> logits[NE]:sum")
    def router_forward(self, x: Array, w: Array) -> Array:
        """Return the logits x w^T (N, E) of x (N, D) and w (E, D), in the type of sums."""
        return self.matmul_nt(x, w)

    @shapes("dlogits[NE] w[ED] -> dx[ND]")
    def router_backward_input(self, dlogits: Array, w: Array) -> Array:
        """Return dx = dlogits w (N, D)."""
        return self.matmul(dlogits, w)

    @shapes("dlogits[NE] x[ND] dw[ED]+ ->")
    def router_backward_weight(self, dlogits: Array, x: Array, dw: Array) -> None:
        """Add dlogits^T x to dw (E, D)."""
        self.matmul_tn_add(dlogits, x, dw)

    @shapes("logits[NE] count=K bias[..E]? -> ids[NK]:int64 probs[NK]:sum")
    def choice_forward(
        self, logits: Array, count: int, bias: Array | None = None
    ) -> tuple[Array, Array]:
        """Return (ids (N, count) of the experts of each token, their probabilities (N, count)).

        They are those of the largest logits (N, E), the largest first; among equal ones the lowest
        id. The probabilities are the softmax over these alone. bias (E,) or (N, E): added to the
        softmax over all logits for the choice, but not for the probabilities (arXiv 2408.15664).
        """
        scores = logits if bias is None else self._row_softmax(logits) + bias
        ids = self.xp.argsort(-scores, axis=-1, kind="stable")[:, :count]
        ids = self.xp.ascontiguousarray(ids, np.int64)
        return ids, self._row_softmax(logits[self.xp.arange(len(ids))[:, None], ids])

    def _row_softmax(self, logits: Array) -> Array:
        """Return the softmax over the last dimension."""
        probs = self.xp.exp(logits - logits.max(axis=-1, keepdims=True))
        probs /= probs.sum(axis=-1, keepdims=True)
        return probs

    @shapes("dprobs[NK] probs[NK] ids[NK] experts=E -> dlogits[NE]:sum")
    def choice_backward_input(self, dprobs: Array, probs: Array, ids: Array, experts: int) -> Array:
        """Return dlogits (N, E) of dprobs (N, K): zero for experts that were not chosen."""
        dlogits = self.xp.zeros((len(ids), experts), probs.dtype)
        inner = (dprobs - self._row_dots(probs, dprobs)[:, None]) * probs
        dlogits[self.xp.arange(len(ids))[:, None], ids] = inner
        return dlogits

    @shapes("ids[BM] experts=E -> loads[BE]:sum")
    def expert_loads(self, ids: Array, experts: int) -> Array:
        """Return how often each expert occurs in each row of ids (B, M): (B, E).

        Ids beyond the experts do not count.
        """
        width = experts + 1
        places = self.xp.minimum(ids, experts) + width * self.xp.arange(len(ids))[:, None]
        loads = self.xp.bincount(places.reshape(-1), minlength=width * len(ids))
        return self.xp.ascontiguousarray(loads.reshape(-1, width)[:, :experts], self.dtype)

    @shapes("ids[NK] -> order[NK]:int64 tokens[NK]:int64 places[NK]:int64")
    def expert_order(self, ids: Array) -> ThreeArrays:
        """Return what sorts the choices of ids (N, K) by expert, then by token, all flat (N, K).

        order: the numbers of the choices, sorted. tokens: their tokens. places: the place of each
        choice in that order.
        """
        order = self.xp.argsort(ids.reshape(-1), kind="stable")
        places = self.xp.empty_like(order)
        places[order] = self.xp.arange(len(order))
        shape = ids.shape
        return order.reshape(shape), (order // shape[1]).reshape(shape), places.reshape(shape)

    @shapes("rows[NKD] probs[NK]? -> y[ND]")
    def combine_rows(self, rows: Array, probs: Array | None = None) -> Array:
        """Return the sum (N, D) over the K rows of each token (N, K, D), in the order of choices.

        probs (N, K): factors of the rows, if given.
        """
        y = rows[:, 0] * (1 if probs is None else probs[:, :1])
        for k in range(1, rows.shape[1]):
            y += rows[:, k] * (1 if probs is None else probs[:, k : k + 1])
        return y

    @shapes("dlogits[BTE]+ logits[BTE] loads[BE] factor ->")
    def balance_backward_input(
        self, dlogits: Array, logits: Array, loads: Array, factor: float
    ) -> None:
        """Add the gradient of factor * sum_e loads[b, e] P[b, t, e] to dlogits (B, T, E).

        P is the softmax over all logits. loads (B, E): how often a row chose each expert; it has no
        gradient (arXiv 2101.03961, section 2.2).
        """
        probs = self._row_softmax(logits)
        inner = loads[:, None, :] - (probs * loads[:, None, :]).sum(axis=-1, keepdims=True)
        inner *= probs
        inner *= self.scalar(factor)
        dlogits += inner

    @shapes("loads[BE] excess[E]+ ->")
    def add_excess(self, loads: Array, excess: Array) -> None:
        """Add E times each expert's excess over the mean load, a whole number, to excess (E,)."""
        total = loads.sum(axis=0)
        excess += total * self.scalar(len(excess)) - total.sum()

    # Elementwise chains. A chain is fast because it works in place on one temporary, which is also
    # the result; `out` says where it is. x * x * x, never x**3: a power is computed through
    # logarithms, 70 times slower.

    @shapes("x[..] -> y[..]")
    def gelu_forward(self, x: Array, out: Array | None = None) -> Array:
        """Return the tanh form of GELU of x: x / (1 + exp(-2 x (A + B x^2)))."""
        y = self.xp.multiply(x, x, out=out)
        self._one_plus_exp(self._minus_2u(y, x, out=y))
        return self.xp.divide(x, y, out=y)

    @shapes("dy[..] x[..] -> dx[..]")
    def gelu_backward_input(self, dy: Array, x: Array, out: Array | None = None) -> Array:
        """Return dx = dy GELU'(x): with s = s(2u), that is s + s (1 - s) x 2u'.

        For large |x|, s (1 - s) is 0 while x and u' are still finite, up to |x| = 1e19 in float32.
        Beyond that the result is NaN.
        """
        slope = x * x  # will become 2u'
        s = self._minus_2u(slope, x)
        self._one_plus_exp(s)
        self.xp.divide(1.0, s, out=s)
        slope *= 6.0 * GELU_B
        slope += 2.0 * GELU_A
        dx = self.xp.subtract(1.0, s, out=out)
        dx *= s
        dx *= x
        dx *= slope
        dx += s
        dx *= dy
        return dx

    def _minus_2u(self, square: Array, x: Array, out: Array | None = None) -> Array:
        """Return -2u, given x^2."""
        z = self.xp.multiply(square, -2.0 * GELU_B, out=out)
        z += -2.0 * GELU_A
        z *= x
        return z

    def _one_plus_exp(self, z: Array) -> None:
        """Write 1 + exp(z) over z. Its reciprocal is s(-z), and 0 where exp(z) overflows."""
        with np.errstate(over="ignore"):
            self.xp.exp(z, out=z)
        z += 1.0

    # SwiGLU: silu(g) = g s(g), with the logistic function s(g) = 1 / (1 + exp(-g)). The two parts
    # of h are gate and up.

    @shapes("h[..2F] -> y[..F]")
    def swiglu_forward(self, h: Array, out: Array | None = None) -> Array:
        """Return silu(gate) up (..., F) of h (..., 2, F), which is gate and up."""
        gate = h[..., 0, :]
        silu = -gate
        self._one_plus_exp(silu)
        self.xp.divide(gate, silu, out=silu)
        return self.xp.multiply(silu, h[..., 1, :], out=out)

    @shapes("dy[..F] h[..2F] -> dh[..2F] y[..F]")
    def swiglu_backward_input(
        self, dy: Array, h: Array, out: Array | None = None
    ) -> tuple[Array, Array]:
        """Return (dh (..., 2, F), and silu(gate) up (..., F) recomputed).

        With s = s(gate): silu' = s + silu (1 - s). Each half of dh is written only once, because on
        a CPU a pass over a strided half takes twice as long as one over a whole array.
        """
        gate, up = h[..., 0, :], h[..., 1, :]
        dh = self.xp.empty(h.shape, h.dtype) if out is None else out
        s = -gate
        self._one_plus_exp(s)
        self.xp.divide(1.0, s, out=s)
        y = gate * s
        self.xp.multiply(dy, y, out=dh[..., 1, :])
        slope = self.scalar(1.0) - s
        slope *= y
        slope += s
        slope *= up
        self.xp.multiply(slope, dy, out=dh[..., 0, :])
        y *= up
        return dh, y

    # Norms over the last dimension. LayerNorm is RMSNorm of x - mean, plus b.

    @shapes("x[..D] w[D] eps -> y[..D] rstd[..]:sum")
    def rmsnorm_forward(
        self, x: Array, w: Array, eps: float, out: Array | None = None
    ) -> tuple[Array, Array]:
        """Return (y, rstd): x (..., D) times rstd = 1 / sqrt(mean(x^2) + eps), scaled; rstd (...).

        Zhang and Sennrich 2019, arXiv 1910.07467.
        """
        square = self._row_dots(x, x) / self.scalar(x.shape[-1])
        rstd = self.scalar(1.0) / self.xp.sqrt(square + self.scalar(eps))
        y = self.xp.multiply(x, rstd[..., None], out=out)
        y *= w
        return y, rstd

    @shapes("dy[..D] x[..D] w[D] rstd[..] -> dx[..D]")
    def rmsnorm_backward_input(
        self, dy: Array, x: Array, w: Array, rstd: Array, out: Array | None = None
    ) -> Array:
        """Return dx = rstd (g - xhat mean(g xhat)), where g = dy w and xhat = x rstd."""
        g = dy * w
        dx = self.xp.multiply(x, rstd[..., None], out=out)  # xhat
        slope = self._row_dots(g, dx) / self.scalar(x.shape[-1])
        dx *= slope[..., None]
        self.xp.subtract(g, dx, out=dx)
        dx *= rstd[..., None]
        return dx

    @shapes("dy[..D] x[..D] rstd[..] dw[D]+ ->")
    def rmsnorm_backward_weight(self, dy: Array, x: Array, rstd: Array, dw: Array) -> None:
        """Add the sum of dy xhat to dw (D,)."""
        dw += self._column_sums(dy * x, rstd)

    @shapes("x[..D] w[D] b[D] eps -> y[..D] mean[..]:sum rstd[..]:sum")
    def layernorm_forward(
        self, x: Array, w: Array, b: Array, eps: float, out: Array | None = None
    ) -> ThreeArrays:
        """Return (y, mean, rstd): x (..., D) normalised and scaled, mean and rstd (...).

        The mean is computed from x - first, whose differences are exact where all of x is equal.
        """
        y = self.xp.subtract(x, x[..., :1], out=out)
        mean = self._row_sums(y) / self.scalar(x.shape[-1])
        y -= mean[..., None]
        _, rstd = ArrayOps.rmsnorm_forward(self, y, w, eps, out=y)
        y += b
        return y, x[..., 0] + mean, rstd

    @shapes("dy[..D] x[..D] w[D] mean[..] rstd[..] -> dx[..D]")
    def layernorm_backward_input(
        self, dy: Array, x: Array, w: Array, mean: Array, rstd: Array, out: Array | None = None
    ) -> Array:
        """Return dx = c - mean(c), where c is the gradient of x - mean."""
        c = self.xp.subtract(x, mean[..., None], out=out)
        ArrayOps.rmsnorm_backward_input(self, dy, c, w, rstd, out=c)
        c -= (self._row_sums(c) / self.scalar(x.shape[-1]))[..., None]
        return c

    @shapes("dy[..D] x[..D] mean[..] rstd[..] dw[D]+ db[D]+ ->")
    def layernorm_backward_weight(
        self, dy: Array, x: Array, mean: Array, rstd: Array, dw: Array, db: Array
    ) -> None:
        """Add the sum of dy xhat to dw (D,) and the sum of dy to db (D,)."""
        part = x - mean[..., None]
        part *= dy
        dw += self._column_sums(part, rstd)
        db += self._column_sums(dy)

    # Embeddings. A table shard holds the rows of the ids [start, start + rows). In the lines P is
    # the number of positions.

    @shapes("ids[..] table[VD] start -> y[..D]")
    def embedding_forward(self, ids: Array, table: Array, start: int) -> Array:
        """Return table[ids - start] (..., D), zeros where an id belongs to another shard."""
        local, inside = self._local_rows(ids, start, table.shape[0])
        if not len(table):
            return self.xp.zeros((*ids.shape, table.shape[1]), table.dtype)
        y = table[local]
        y[~inside] = self.scalar(0.0)
        return y

    @shapes("ids[..] dy[..D] dtable[VD]+ start ->")
    def embedding_backward_weight(self, ids: Array, dy: Array, dtable: Array, start: int) -> None:
        """Add each row of dy (..., D) to its id's row of dtable, if this shard holds it."""
        local, inside = self._local_rows(ids, start, dtable.shape[0])
        self.xp.add.at(dtable, local[inside], dy[inside])

    def _local_rows(self, ids: Array, start: int, rows: int) -> tuple[Array, Array]:
        """Return (row numbers, 0 where outside; whether the shard holds the id)."""
        local = ids - start
        inside = (local >= 0) & (local < rows)
        return self.xp.where(inside, local, 0), inside

    @shapes("x[BTD] positions[T] table[PD] -> y[BTD]")
    def position_forward(self, x: Array, positions: Array, table: Array) -> Array:
        """Return x (B, T, D) + table[positions]."""
        return x + table[positions]

    @shapes("positions[T] dy[BTD] dtable[PD]+ ->")
    def position_backward_weight(self, positions: Array, dy: Array, dtable: Array) -> None:
        """Add the batch sum of dy (B, T, D) to the rows `positions` of dtable."""
        self.embedding_backward_weight(positions, dy.sum(axis=0), dtable, 0)

    # Rotary positions. In the lines h is d/2, and positions are (T,) or (B, T).

    @shapes("x[BTHd]+ positions table[P2h] -> x")
    def rope_forward(self, x: Array, positions: Array, table: Array) -> Array:
        """Rotate each head of x (B, T, H, d) in place by the angles of its position; return x.

        Numbers i < d/2 and i + d/2 of a head are the coordinates of a point. positions (T,), or
        (B, T) where rows differ. table (P, 2, d/2): cosine and sine of its angle at each position.
        """
        self._rotate(x, table[positions, 0], table[positions, 1])
        return x

    @shapes("dy[BTHd]+ positions table[P2h] -> dy")
    def rope_backward_input(self, dy: Array, positions: Array, table: Array) -> Array:
        """Rotate dy in place by the angles of rope_forward in reverse; return dy."""
        self._rotate(dy, table[positions, 0], -table[positions, 1])
        return dy

    def _rotate(self, x: Array, cos: Array, sin: Array) -> None:
        """Rotate x (B, T, H, d) in place; cos and sin (T, d/2) or (B, T, d/2)."""
        assert x.shape[-1] == 2 * cos.shape[-1], (x.shape, cos.shape)
        points = x.reshape(*x.shape[:-1], 2, -1)
        turned = points[..., ::-1, :] * self.xp.stack([-sin, sin], axis=-2)[..., None, :, :]
        x *= self.xp.concatenate([cos, cos], axis=-1)[..., None, :]
        x += turned.reshape(x.shape)

    # Causal attention. Arguments: q (B, Tq, H, d), k and v (B, Tk, Hkv, d), positions q_pos (Tq,)
    # and k_pos (Tk,). B rows of a batch, H heads of d elements. Query i sees key j if and only if
    # k_pos[j] <= q_pos[i]. In the lines Q is Tq, K is Tk and G is Hkv; what is saved may be a pair
    # instead. H is a multiple of Hkv: query head h uses key and value head h // (H / Hkv). A query
    # that sees no key gets y = 0.
    #
    # There are two forms, which differ in what they keep between forward and backward.
    # `attention_forward` and `attention_backward_input` keep the probabilities and take four
    # products backward. The block form keeps only two numbers per query, stats (B, H, Tq, 2): the
    # largest score and the sum of exp(score - largest) over the keys. It recomputes the
    # probabilities and takes five products backward. A single number, the log of the sum of
    # exp(score), would round the sum away beside large scores.
    #
    # The keys of one call of the block form may be a part of all keys. `attention_merge` then joins
    # two results, and gradients are sums. For this reason y, stats and gradients of this form are
    # float32 even with 16-bit activations; the caller who has joined them rounds once, by `copy`.
    #
    # For a query without keys the largest score is the lowest finite number, `ArrayOps.lowest`, and
    # the sum is 0. Every finite score therefore counts, and no difference is inf - inf = NaN. A
    # score is rounded like any other number: at 1e7 in float32 it may be off by 1, and a
    # probability by a factor of e. Scores beyond the largest number of the type give NaN, or count
    # as hidden if they are negative.

    def _stacked_products(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """Return a b for every leading index: (B, H, M, K), (B, H, K, N) give (B, H, M, N).

        out: where to write it, if given; it may be a view.
        """
        return self.xp.matmul(a, b, out=out)

    @shapes("q[BQHd] k[BKGd] v[BKGd] q_pos[Q] k_pos[K] -> y[BQHd] saved[BHQK]")
    def attention_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Any]:
        """Return (y (B, Tq, H, d), probs (B, H, Tq, Tk), whose hidden part is 0)."""
        probs = self._causal_softmax(self._dots(q, k), q_pos, k_pos, q.shape[-1] ** -0.5)
        probs = probs.astype(q.dtype, copy=False)
        return self._weighted(probs, v, q.dtype), probs

    @shapes(
        "dy[BQHd] q[BQHd] k[BKGd] v[BKGd] saved q_pos[Q] k_pos[K] out? -> "
        "dq[BQHd] dk[BKGd] dv[BKGd]"
    )
    def attention_backward_input(
        self,
        dy: Array,
        q: Array,
        k: Array,
        v: Array,
        saved: Any,
        q_pos: Array,
        k_pos: Array,
        *,
        out: ThreeArrays | None = None,
    ) -> ThreeArrays:
        """Return (dq, dk, dv), given the probabilities that `attention_forward` saved.

        In each row, dscores = probs (dprobs - sum(probs dprobs)). out: three arrays to write to.
        """
        results = out or tuple(self.xp.empty(x.shape, x.dtype) for x in (q, k, v))
        factor = self.scalar(q.shape[-1] ** -0.5)
        dscores = self._softmax_backward(saved, self._dots(dy, v), factor)
        return self._gradients(dy, q, k, saved, dscores, results)

    @shapes("q[BQHd] k[BKGd] v[BKGd] q_pos[Q] k_pos[K] -> y[BQHd]:sum stats[BHQ2]:sum")
    def attention_block_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Array]:
        """Return (y (B, Tq, H, d), stats (B, H, Tq, 2)) over these keys; y = 0 without keys."""
        scores = self._visible(self._dots(q, k), q_pos, k_pos, q.shape[-1] ** -0.5)
        probs, stats = self._normalised(scores)
        return self._weighted(probs.astype(q.dtype, copy=False), v, self.statistics), stats

    @shapes("y[BQHd]+ stats[BHQ2]+ y2[BQHd] stats2[BHQ2] ->")
    def attention_merge(self, y: Array, stats: Array, y2: Array, stats2: Array) -> None:
        """Merge attention over a second set of keys into y and stats, float32 or wider.

        Each sum shrinks by exp(its largest score - the largest of both). The new y is the mean of y
        and y2, weighted by these sums.
        """
        assert y.shape == y2.shape, (y.shape, y2.shape)
        assert stats.shape == stats2.shape, (stats.shape, stats2.shape)
        assert y.dtype == stats.dtype == self.statistics, (y.dtype, stats.dtype)
        top = self.xp.maximum(stats[..., 0], stats2[..., 0])
        with np.errstate(over="ignore"):  # a difference below all numbers is small enough
            own, other = (one[..., 1] * self.xp.exp(one[..., 0] - top) for one in (stats, stats2))
        total = own + other
        y *= (own / filled(total)).transpose(0, 2, 1)[..., None]
        y += (other / filled(total)).transpose(0, 2, 1)[..., None] * y2
        stats[..., 0], stats[..., 1] = top, total

    @shapes("dy[BQHd] y[BQHd] -> delta[BHQ]:sum")
    def attention_delta(self, dy: Array, y: Array) -> Array:
        """Return delta (B, H, Tq), the sum of dy y over a head, where y is over all keys."""
        assert dy.shape == y.shape, (dy.shape, y.shape)
        delta = (dy * y).sum(axis=-1, dtype=self.statistics)
        return self.xp.ascontiguousarray(delta.transpose(0, 2, 1))

    @shapes(
        "dy[BQHd] q[BQHd] k[BKGd] v[BKGd] stats[BHQ2] delta[BHQ] q_pos[Q] k_pos[K] -> "
        "dq[BQHd]:sum dk[BKGd]:sum dv[BKGd]:sum"
    )
    def attention_block_backward(
        self,
        dy: Array,
        q: Array,
        k: Array,
        v: Array,
        stats: Array,
        delta: Array,
        *,
        q_pos: Array,
        k_pos: Array,
    ) -> ThreeArrays:
        """Return the parts of (dq, dk, dv) due to these keys; stats and delta are over all keys.

        In each row, probs = exp(scores - largest) / sum and dscores = probs (dprobs - delta): Dao
        et al. 2022.
        """
        factor = self.scalar(q.shape[-1] ** -0.5)
        scores = self._visible(self._dots(q, k), q_pos, k_pos, factor)
        probs = self.xp.exp(scores - stats[..., :1]) / filled(stats[..., 1:])
        dscores = probs * (self._dots(dy, v) - delta[..., None]) * factor
        out = tuple(self.xp.empty(x.shape, self.statistics) for x in (q, k, v))
        return self._gradients(dy, q, k, probs.astype(q.dtype, copy=False), dscores, out)

    # The parts of both forms. A group is the set of query heads that share one key head.

    @staticmethod
    def _members(q: Array, k: Array) -> list[slice]:
        """Return a slice of the query heads for each place in a group: one head of each group."""
        group, rest = divmod(q.shape[2], k.shape[2])
        assert rest == 0, (q.shape, k.shape)
        return [slice(first, None, group) for first in range(group)]

    def _dots(self, a: Array, b: Array) -> Array:
        """Return a b^T (B, H, Tq, Tk) of a (B, Tq, H, d) and b (B, Tk, Hkv, d)."""
        out = self.xp.empty((a.shape[0], a.shape[2], a.shape[1], b.shape[1]), self.statistics)
        for one in self._members(a, b):
            self._stacked_products(_heads_first(a)[:, one], b.transpose(0, 2, 3, 1), out[:, one])
        return out

    def _visible(self, scores: Array, q_pos: Array, k_pos: Array, factor: float) -> Array:
        """Return factor scores (B, H, Tq, Tk), -inf where a query does not see a key."""
        visible = k_pos[None, :] <= q_pos[:, None]
        return self.xp.where(visible, scores * self.scalar(factor), self.scalar(-np.inf))

    def _normalised(self, scores: Array) -> tuple[Array, Array]:
        """Return (softmax of each row, 0 in a row of -inf; stats)."""
        top = self.xp.maximum(scores.max(axis=-1), self.lowest)
        probs = self.xp.exp(scores - top[..., None])
        total = probs.sum(axis=-1)
        probs /= filled(total)[..., None]
        return probs, self.xp.stack([top, total], axis=-1)

    def _causal_softmax(self, scores: Array, q_pos: Array, k_pos: Array, factor: float) -> Array:
        """Return softmax of factor scores over the visible keys, 0 elsewhere."""
        return self._normalised(self._visible(scores, q_pos, k_pos, factor))[0]

    def _softmax_backward(self, probs: Array, dprobs: Array, factor: Any) -> Array:
        """Return the gradient of the products q k^T."""
        return probs * (dprobs - (probs * dprobs).sum(axis=-1, keepdims=True)) * factor

    def _weighted(self, probs: Array, v: Array, dtype: Any) -> Array:
        """Return y = probs v (B, Tq, H, d) in a type."""
        batch, heads, queries, _ = probs.shape
        y = self.xp.empty((batch, queries, heads, v.shape[-1]), dtype)
        for one in self._members(y, v):
            self._stacked_products(probs[:, one], _heads_first(v), _heads_first(y)[:, one])
        return y

    def _gradients(
        self, dy: Array, q: Array, k: Array, probs: Array, dscores: Array, out: Sequence[Array]
    ) -> ThreeArrays:
        """Write dq, dk, dv to the arrays `out` and return them."""
        dq, dk, dv = out
        dscores = dscores.astype(q.dtype, copy=False)
        for one in self._members(q, k):
            self._stacked_products(dscores[:, one], _heads_first(k), _heads_first(dq)[:, one])
        for rows, right, total in ((dscores, q, dk), (probs, dy, dv)):
            # A key's gradient is the sum over its group.
            parts = [
                self._stacked_products(
                    rows[:, one].transpose(0, 1, 3, 2),
                    _heads_first(right)[:, one],
                    self.xp.empty(_heads_first(total).shape, self.statistics),
                )
                for one in self._members(q, k)
            ]
            _heads_first(total)[...] = sum(parts)
        return dq, dk, dv

    # Loss and choice of tokens over a vocabulary shard. N tokens, V columns of the shard. Columns j
    # with start + j >= num_valid are padding, worth -inf. The maximum over no columns is the lowest
    # finite number, so that every finite logit counts and no difference is inf - inf = NaN. A
    # maximum and a sum of exp(logit - maximum) stay two numbers, because a single one, their
    # log-sum-exp, would round the sum away beside a large maximum.

    @shapes("logits[..V] targets[..] start num_valid -> stats[..3]:sum")
    def cross_entropy_forward(
        self, logits: Array, targets: Array, start: int, num_valid: int
    ) -> Array:
        """Return stats (N, 3): maximum, sum of exp(logit - maximum), logit of the target or 0.

        logits (N, V), targets (N,) global ids below num_valid. A shard that is all padding gives
        (the lowest number, 0, 0).
        """
        valid = logits[:, : valid_columns(logits, start, num_valid)]
        stats = self.xp.zeros((logits.shape[0], 3), self.dtype)
        stats[:, 0] = self.lowest
        if valid.shape[1]:
            stats[:, 0] = valid.max(axis=1)
            stats[:, 1] = self._exp_sums(valid, stats[:, 0])
            column, inside = self._local_rows(targets, start, valid.shape[1])
            picked = valid[self.xp.arange(len(targets)), column]
            stats[:, 2] = self.xp.where(inside, picked, self.scalar(0.0))
        return stats

    def _exp_sums(self, valid: Array, top: Array) -> Array:
        """Return the sum of exp(value - top) of each row of valid."""
        part = valid - top[:, None]
        return self._row_sums(self.xp.exp(part, out=part))

    @shapes("stats[SN3] -> loss[N]:sum sums[N2]:sum")
    def cross_entropy_combine(self, stats: Array) -> tuple[Array, Array]:
        """Return (loss (N,), sums (N, 2)) from the stats of all shards (shards, N, 3).

        sums: maximum and sum of exp(logit - maximum) over the whole vocabulary.
        """
        top = stats[..., 0].max(axis=0)
        with np.errstate(over="ignore"):  # a difference below all numbers is small enough
            total = (stats[..., 1] * self.xp.exp(stats[..., 0] - top)).sum(axis=0)
        loss = top - stats[..., 2].sum(axis=0) + self.xp.log(total)
        return loss, self.xp.stack([top, total], axis=-1)

    @shapes("logits[..V]+ targets[..] sums[..2] start num_valid scale -> logits")
    def cross_entropy_backward_input(
        self, logits: Array, targets: Array, sums: Array, start: int, num_valid: int, scale: float
    ) -> Array:
        """Write (softmax - onehot) * scale over logits (padding: 0) and return that array."""
        columns = valid_columns(logits, start, num_valid)
        valid = logits[:, :columns]
        logits[:, columns:] = self.scalar(0.0)
        self._scaled_softmax(valid, sums, scale)
        if columns:
            # One target per row: no index occurs twice. A mask as an index would be read by the
            # host.
            column, inside = self._local_rows(targets, start, columns)
            hit = self.xp.where(inside, self.scalar(scale), self.scalar(0.0))
            valid[self.xp.arange(len(targets)), column] -= hit
        return logits

    def _scaled_softmax(self, valid: Array, sums: Array, scale: float) -> None:
        """Write softmax * scale over valid."""
        valid -= sums[:, :1]
        self.xp.exp(valid, out=valid)
        valid *= self.scalar(scale) / sums[:, 1:]

    @shapes("logits[..V] start num_valid count=K -> best[..K2]:float64")
    def top_forward(self, logits: Array, start: int, num_valid: int, count: int) -> Array:
        """Return (N, count, 2) float64: the largest logits and their global ids, best first.

        Among equal logits the lowest id comes first. A shard with fewer columns is filled up with
        -inf. The first logit of a row that contains NaN is NaN.
        """
        xp, valid = self.xp, logits[:, : valid_columns(logits, start, num_valid)]
        columns = valid.shape[1]
        take = min(count, columns)
        best = xp.empty((logits.shape[0], count, 2), np.float64)
        best[..., 0], best[..., 1] = -np.inf, start
        if take:
            top = valid.max(axis=1)
            last = (
                top
                if take == 1
                else (xp.partition(valid, columns - take, axis=1)[:, columns - take])
            )
            for row in range(len(valid)):
                # Only logits that reach the last place are sorted, including all that equal it.
                ids = xp.nonzero(valid[row] >= last[row])[0]
                ids = ids[xp.argsort(-valid[row, ids], kind="stable")[:take]]
                best[row, : len(ids), 0] = valid[row, ids]
                best[row, : len(ids), 1] += ids
            best[:, 0, 0] = top  # NaN if any logit is
        return best

    # Updates of flat buffers in place.

    @shapes("data[..]+ grad[..] rate ->")
    def sign_step(self, data: Array, grad: Array, rate: float) -> None:
        """Subtract rate from data where grad is positive, and add it where grad is negative."""
        data -= self.scalar(rate) * self.xp.sign(grad)

    @shapes("data[..]+ grad[..] lr ->")
    def sgd_step(self, data: Array, grad: Array, lr: float) -> None:
        """Subtract lr * grad from data."""
        data -= self.scalar(lr) * grad

    @shapes("data[..]+ grad[..] m[..]+ v[..]+ lr beta1 beta2 eps weight_decay step copy[..]+? ->")
    def adamw_step(
        self,
        data: Array,
        grad: Array,
        m: Array,
        v: Array,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        copy: Array | None = None,
    ) -> None:
        """Update data, m, v in place; step counts from 1. copy: receives the new data, rounded.

        Weight decay is decoupled from the gradient, and eps is outside the root. Source: Loshchilov
        and Hutter, arXiv 1711.05101.
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

    @shapes(
        "data[..]+ grad[..] m[..]+ v[..]+ runs lr beta1 beta2 eps weight_decay step copy[..]+? ->"
    )
    def adamw_runs(
        self,
        data: Array,
        grad: Array,
        m: Array,
        v: Array,
        runs: Runs,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        copy: Array | None = None,
    ) -> None:
        """Update flat buffers as `adamw_step` does; some parts have no weight decay.

        runs: (whether its weights decay, slice) of each part of the buffers.
        """
        for decays, run in runs:
            self.adamw_step(
                data[run],
                grad[run],
                m[run],
                v[run],
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                weight_decay=weight_decay if decays else 0.0,
                step=step,
                copy=None if copy is None else copy[run],
            )


def _groups(counts: Sequence[int], x: Array) -> Iterator[tuple[int, slice]]:
    """Yield (expert, its rows) for the experts that have some of the rows of x."""
    first = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(first, first + count)
        first += count
    assert first == len(x), (counts, len(x))


def as_rows(x: Array) -> Array:
    """Return x (..., K) as a matrix (rows, K)."""
    return x.reshape(-1, x.shape[-1])


def filled(total: Array) -> Array:
    """Return total as a divisor: 1 where it is 0 because no key is visible."""
    return total + (total == 0)


def _heads_first(x: Array) -> Array:
    """Return the view (B, H, T, d) of an array (B, T, H, d)."""
    return x.transpose(0, 2, 1, 3)


def valid_columns(logits: Array, start: int, num_valid: int) -> int:
    """Return the number of leading columns of a shard that are not padding."""
    return min(max(num_valid - start, 0), int(logits.shape[1]))


def rope_table(length: int, width: int, theta: float, scaling: Sequence[float]) -> np.ndarray:
    """Return cosine and sine (P, 2, d/2) of the angles p f_i at positions p < length, float64."""
    angles = np.outer(np.arange(length), rope_frequencies(width, theta, scaling))
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def rope_frequencies(width: int, theta: float, scaling: Sequence[float]) -> np.ndarray:
    """Return f_i = theta^(-2i/d) of the d/2 points of a head, float64.

    scaling: (factor, low, high, length) of Llama 3, or () for none. A rotation with fewer than
    `low` turns within `length` positions becomes slower by `factor`, one with more than `high`
    turns stays, and between them the two are mixed. Source: Dubey et al., arXiv 2407.21783, and
    Hugging Face's `rope_type: llama3`.
    """
    frequencies = theta ** -(np.arange(0, width, 2) / width)
    if not scaling:
        return frequencies
    factor, low, high, length = scaling
    turns = length * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / factor)
