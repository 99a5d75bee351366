"""Arrays and the formulas that all others stand on: memory, sums, products, updates of buffers.

The rules of all formulas are in `array_ops`.
"""

from collections.abc import Sequence
from time import perf_counter_ns
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpipar.ops.signature import Array, Runs, Shape, memory, shapes

if TYPE_CHECKING:
    from mpipar.ops.cupy_copies import Copies

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: its multiples are spread evenly


class AdamWStep(NamedTuple):
    """The numbers of one AdamW update. step: counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class Arrays:
    """The base of `ArrayOps`, over `xp` (the module numpy or cupy) in one floating-point type.

    dtype: of activations. accum_dtype: of gradients and sums. tiled_head_width: the widest head
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

    def __init__(self, xp: ModuleType, dtype: DTypeLike, device: str) -> None:
        self.xp, self.device = xp, device
        self.dtype: np.dtype = np.dtype(dtype)
        self.accum_dtype = self.dtype
        # A NumPy float64 scalar would widen a float32 array (NEP 50), so this casts every scalar.
        self.scalar: Any = self.dtype.type
        self.neg_max = np.finfo(self.dtype).min  # the maximum of an empty set, in this type

    # Memory. `label` says what the bytes are for; only the shape implementation counts them.

    @memory
    def empty(self, shape: Shape, dtype: DTypeLike | None = None, label: str = "stash") -> Array:
        """Return an uninitialised array."""
        return self.xp.empty(shape, self.dtype if dtype is None else dtype)

    @memory
    def zeros(self, shape: Shape, dtype: DTypeLike | None = None, label: str = "stash") -> Array:
        """Return an array of zeros."""
        return self.xp.zeros(shape, self.dtype if dtype is None else dtype)

    @memory
    def asarray(self, host: np.ndarray) -> Array:
        """Return a host array as an array of this device, same type (CPU: the same memory)."""
        return self.xp.asarray(host)

    @memory
    def to_host(self, x: Array) -> np.ndarray:
        """Return x as a NumPy array (on the CPU: x itself)."""
        return np.asarray(x)

    @memory
    def to_floats(self, xs: Sequence[Any]) -> list[float]:
        """Return the results of `sum` and `square_sum` as floats of the host, all in one copy."""
        return list(map(float, xs))

    @memory
    def pinned(self, shape: Shape, dtype: DTypeLike) -> np.ndarray:
        """Return an uninitialised host array from which copies to the device run fastest."""
        return np.empty(shape, dtype)

    @memory
    def synchronize(self) -> None:
        """Wait until everything queued on the device is done (on the CPU: nothing is queued)."""

    @memory
    def timestamp(self) -> Any:
        """Return the instant when all queued work is done: a mark on the device or (CPU) a time."""
        return perf_counter_ns()

    @memory
    def nanoseconds(self, instants: Sequence[Any]) -> list[int]:
        """Return instants as ns of the host's clock. The caller has waited for the device."""
        return list(instants)

    @shapes("x[..]+ value ->", exact=True)
    def fill(self, x: Array, value: float) -> None:
        """Set every element of x to value."""
        x[...] = self.scalar(value)

    @shapes("dst[..]+ src[..] ->", exact=True)
    def copy(self, dst: Array, src: Array) -> None:
        """Copy src over dst; both have the same shape."""
        assert dst.shape == src.shape, (dst.shape, src.shape)
        dst[...] = src

    @shapes("x[..]+ factor -> x", exact=True)
    def scale(self, x: Array, factor: float) -> Array:
        """Multiply x by a number in place and return it."""
        x *= self.scalar(factor)
        return x

    @shapes("x[..]+ y[..] -> x", exact=True)
    def accumulate(self, x: Array, y: Array) -> Array:
        """Add y to x in place and return x; both have the same shape."""
        assert x.shape == y.shape, (x.shape, y.shape)
        x += y
        return x

    @shapes("parts[P..] total[..]+? -> total[..]")
    def add_parts(self, parts: Array, total: Array | None = None) -> Array:
        """Return the sum of parts (P, ...) over its first dimension, written to total if given."""
        return parts.sum(axis=0, out=total)

    @shapes("x[..] -> total:host", exact=True)
    def sum(self, x: Array) -> Array:
        """Return the sum of x, accumulated in float64, for `to_floats` to read.

        On a device it is an array (), so that the host does not wait yet, elsewhere a number.
        """
        return x.sum(dtype=np.float64)

    @shapes("x[..] -> total:host", exact=True)
    def square_sum(self, x: Array) -> Any:
        """Return the sum of squares of x, accumulated in float64; see `sum`."""
        return float(self.xp.square(x.astype(np.float64)).sum())

    @shapes("x[..] -> total:host", exact=True)
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
        odd = odd ^ (odd >> np.uint64(29)) | np.uint64(1)
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

    @shapes("x[..K] w[KM] -> y[..M]", flops="2..KM")
    def matmul(self, x: Array, w: Array) -> Array:
        """Return x w: (..., K) times (K, M) gives (..., M)."""
        return (as_rows(x) @ w).reshape(*x.shape[:-1], w.shape[1])

    @shapes("x[..M] w[KM] -> y[..K]", flops="2..KM")
    def matmul_nt(self, x: Array, w: Array) -> Array:
        """Return x w^T."""
        return self.matmul(x, w.T)

    @shapes("x[..K] y[..M] out[KM]+ ->", flops="2..KM")
    def matmul_tn_add(self, x: Array, y: Array, out: Array) -> None:
        """Add x^T y to out, which may be a transposed view."""
        assert out.shape == (x.shape[-1], y.shape[-1]), (out.shape, x.shape, y.shape)
        out += as_rows(x).T @ as_rows(y)

    @shapes("x[..K] w[KM] b[M]? -> y[..M]", flops="2..KM")
    def matmul_bias(self, x: Array, w: Array, b: Array | None) -> Array:
        """Return x w (..., M), plus b if there is one."""
        y = self.matmul(x, w)
        return y if b is None else self.bias_forward(y, b)

    @shapes("x[..K] y[..M] out[KM]+ sums[M]+? ->", flops="2..KM")
    def matmul_tn_add_sums(self, x: Array, y: Array, out: Array, sums: Array | None) -> None:
        """Add x^T y to out as `matmul_tn_add` does, and the sum of the rows of y to sums (M,)."""
        self.matmul_tn_add(x, y, out)
        if sums is not None:
            self.bias_backward_weight(y, sums)

    @shapes("y[..M]+ b[M] -> y", exact=True)
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

    # Updates of flat buffers in place.

    @shapes("data[..]+ grad[..] lr ->", rows=True, exact=True)
    def sgd_step(self, data: Array, grad: Array, lr: float) -> None:
        """Subtract lr * grad from data."""
        data -= self.scalar(lr) * grad

    @shapes("data[..]+ grad[..] m[..]+ v[..]+ by copy[..]+? ->", rows=True, exact=True)
    def adamw_step(
        self, data: Array, grad: Array, m: Array, v: Array, by: AdamWStep, copy: Array | None = None
    ) -> None:
        """Update data, m, v in place. copy: receives the new data, rounded.

        Weight decay is decoupled from the gradient, and eps is outside the root. Source: Loshchilov
        and Hutter, arXiv 1711.05101.
        """
        cast = self.scalar
        part = grad * cast(1.0 - by.beta1)
        m *= cast(by.beta1)
        m += part
        self.xp.multiply(grad, grad, out=part)
        part *= cast(1.0 - by.beta2)
        v *= cast(by.beta2)
        v += part
        self.xp.sqrt(v, out=part)
        part *= cast((1.0 - by.beta2**by.step) ** -0.5)
        part += cast(by.eps)
        self.xp.divide(m, part, out=part)
        part *= cast(by.lr / (1.0 - by.beta1**by.step))
        data *= cast(1.0 - by.lr * by.weight_decay)
        data -= part
        if copy is not None:
            self.copy(copy, data)

    @shapes("data[..]+ grad[..] m[..]+ v[..]+ runs by copy[..]+? ->", exact=True)
    def adamw_runs(
        self,
        data: Array,
        grad: Array,
        m: Array,
        v: Array,
        runs: Runs,
        by: AdamWStep,
        copy: Array | None = None,
    ) -> None:
        """Update flat buffers as `adamw_step` does; runs without weight decay have none."""
        for decays, run in runs:
            state = data[run], grad[run], m[run], v[run]
            copied = None if copy is None else copy[run]
            self.adamw_step(*state, by if decays else by._replace(weight_decay=0.0), copied)


def as_rows(x: Array) -> Array:
    """Return x (..., K) as a matrix (rows, K)."""
    return x.reshape(-1, x.shape[-1])


def nonzero(total: Array) -> Array:
    """Return total as a divisor: 1 where it is 0 because nothing is summed."""
    return total + (total == 0)
