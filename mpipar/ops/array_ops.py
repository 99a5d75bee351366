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

import numpy as np

from mpipar.ops.array_attention import AttentionFormulas
from mpipar.ops.array_experts import ExpertFormulas
from mpipar.ops.signature import Array, ThreeArrays, shapes

# GELU, tanh form: 0.5 x (1 + tanh u), u = GELU_A x + GELU_B x^3; arXiv 1606.08415. It equals x
# s(2u) with the logistic function s, whose small values keep their digits; 1 + tanh u would lose
# them.
GELU_A = math.sqrt(2.0 / math.pi)
GELU_B = 0.044715 * GELU_A


class ArrayOps(AttentionFormulas, ExpertFormulas):
    """The array functions over `xp` (the module numpy or cupy) in one floating-point type.

    Here are those of what lies between the products, of embeddings and of the loss.
    """

    # Elementwise chains. A chain is fast because it works in place on one temporary, which is also
    # the result; `out` says where it is. x * x * x, never x**3: a power is computed through
    # logarithms, 70 times slower.

    @shapes("x[..] -> y[..]", rows=True)
    def gelu_forward(self, x: Array, out: Array | None = None) -> Array:
        """Return the tanh form of GELU of x: x / (1 + exp(-2 x (A + B x^2)))."""
        y = self.xp.multiply(x, x, out=out)
        self._one_plus_exp(self._minus_2u(y, x, out=y))
        return self.xp.divide(x, y, out=y)

    @shapes("dy[..] x[..] -> dx[..]", rows=True)
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

    @shapes("h[..2F] -> y[..F]", rows=True)
    def swiglu_forward(self, h: Array, out: Array | None = None) -> Array:
        """Return silu(gate) up (..., F) of h (..., 2, F), which is gate and up."""
        gate = h[..., 0, :]
        silu = -gate
        self._one_plus_exp(silu)
        self.xp.divide(gate, silu, out=silu)
        return self.xp.multiply(silu, h[..., 1, :], out=out)

    @shapes("dy[..F] h[..2F] -> dh[..2F] y[..F]", rows=True)
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

    @shapes("x[..D] w[D] eps -> y[..D] rstd[..]:sum", rows=True)
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

    @shapes("dy[..D] x[..D] w[D] rstd[..] around[..D]? -> dx[..D]", rows=True)
    def rmsnorm_backward_input(
        self,
        dy: Array,
        x: Array,
        w: Array,
        rstd: Array,
        around: Array | None = None,
        *,
        out: Array | None = None,
    ) -> Array:
        """Return dx = rstd (g - xhat mean(g xhat)), where g = dy w and xhat = x rstd.

        around: the gradient of x that flows around the norm, to be added.
        """
        g = dy * w
        dx = self.xp.multiply(x, rstd[..., None], out=out)  # xhat
        slope = self._row_dots(g, dx) / self.scalar(x.shape[-1])
        dx *= slope[..., None]
        self.xp.subtract(g, dx, out=dx)
        dx *= rstd[..., None]
        if around is not None:
            dx += around
        return dx

    @shapes("dy[..D] x[..D] rstd[..] dw[D]+ ->", rows=True)
    def rmsnorm_backward_weight(self, dy: Array, x: Array, rstd: Array, dw: Array) -> None:
        """Add the sum of dy xhat to dw (D,)."""
        dw += self._column_sums(dy * x, rstd)

    @shapes("x[..D] w[D] b[D] eps -> y[..D] mean[..]:sum rstd[..]:sum", rows=True)
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

    @shapes("dy[..D] x[..D] w[D] mean[..] rstd[..] around[..D]? -> dx[..D]", rows=True)
    def layernorm_backward_input(
        self,
        dy: Array,
        x: Array,
        w: Array,
        mean: Array,
        rstd: Array,
        around: Array | None = None,
        *,
        out: Array | None = None,
    ) -> Array:
        """Return dx = c - mean(c), where c is the gradient of x - mean; around as in RMSNorm."""
        c = self.xp.subtract(x, mean[..., None], out=out)
        ArrayOps.rmsnorm_backward_input(self, dy, c, w, rstd, out=c)
        c -= (self._row_sums(c) / self.scalar(x.shape[-1]))[..., None]
        if around is not None:
            c += around
        return c

    @shapes("dy[..D] x[..D] mean[..] rstd[..] dw[D]+ db[D]+ ->", rows=True)
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

    @shapes("ids[..] table[VD] start -> y[..D]", exact=True)
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

    @shapes("x[BTD] positions[..T] table[PD] -> y[BTD]")
    def position_forward(self, x: Array, positions: Array, table: Array) -> Array:
        """Return x (B, T, D) + table[positions]; positions (T,) or (B, T)."""
        return x + table[positions]

    @shapes("positions[T] dy[BTD] dtable[PD]+ ->")
    def position_backward_weight(self, positions: Array, dy: Array, dtable: Array) -> None:
        """Add the batch sum of dy (B, T, D) to the rows `positions` of dtable."""
        self.embedding_backward_weight(positions, dy.sum(axis=0), dtable, 0)

    # Loss and choice of tokens over a vocabulary shard. N tokens, V columns of the shard. Columns j
    # with start + j >= num_valid are padding, worth -inf. The maximum over no columns is the lowest
    # finite number, so that every finite logit counts and no difference is inf - inf = NaN. A
    # maximum and a sum of exp(logit - maximum) stay two numbers, because a single one, their
    # log-sum-exp, would round the sum away beside a large maximum.

    @shapes("logits[..V] targets[..] start num_valid -> stats[..3]:sum", rows=True)
    def cross_entropy_forward(
        self, logits: Array, targets: Array, start: int, num_valid: int
    ) -> Array:
        """Return stats (N, 3): maximum, sum of exp(logit - maximum), logit of the target or 0.

        logits (N, V), targets (N,) global ids below num_valid. A shard that is all padding gives
        (the lowest number, 0, 0).
        """
        valid = logits[:, : valid_columns(logits, start, num_valid)]
        stats = self.xp.zeros((logits.shape[0], 3), self.dtype)
        stats[:, 0] = self.neg_max
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

    @shapes("stats[SN3] -> loss[N]:sum sums[N2]:sum", exact=True)
    def cross_entropy_combine(self, stats: Array) -> tuple[Array, Array]:
        """Return (loss (N,), sums (N, 2)) from the stats of all shards (shards, N, 3).

        sums: maximum and sum of exp(logit - maximum) over the whole vocabulary.
        """
        top = stats[..., 0].max(axis=0)
        with np.errstate(over="ignore"):  # a difference below all numbers is small enough
            total = (stats[..., 1] * self.xp.exp(stats[..., 0] - top)).sum(axis=0)
        loss = top - stats[..., 2].sum(axis=0) + self.xp.log(total)
        return loss, self.xp.stack([top, total], axis=-1)

    @shapes("logits[..V]+ targets[..] sums[..2] start num_valid scale -> logits", rows=True)
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

    @shapes("logits[..V] start num_valid count=K -> best[..K2]:float64", rows=True)
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
            last = (  # of those taken: a partition costs much more than a maximum
                xp.partition(valid, columns - take, axis=1)[:, columns - take] if take > 1 else top
            )
            for row in range(len(valid)):
                # Only logits that reach the last place are sorted, including all that equal it.
                ids = xp.nonzero(valid[row] >= last[row])[0]
                ids = ids[xp.argsort(-valid[row, ids], kind="stable")[:take]]
                best[row, : len(ids), 0] = valid[row, ids]
                best[row, : len(ids), 1] += ids
            best[:, 0, 0] = top  # NaN if any logit is
        return best


def valid_columns(logits: Array, start: int, num_valid: int) -> int:
    """Return the number of leading columns of a shard that are not padding."""
    return min(max(num_valid - start, 0), int(logits.shape[1]))
