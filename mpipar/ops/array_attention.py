"""The formulas of causal attention and of rotary positions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.ops.arrays import Arrays, nonzero
from mpipar.ops.signature import Array, ThreeArrays, shapes


class AttentionFormulas(Arrays):
    """The part of `ArrayOps` that attention uses."""

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
    # FLOPs are those of the full square, the convention of published model FLOPs: 2 B H Tq d Tk for
    # each product of all queries with all keys, of which a function has two, four or five.
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
    # For a query without keys the largest score is `neg_max`, the lowest finite number, and the sum
    # is 0. Every finite score therefore counts, and no difference is inf - inf = NaN. A
    # score is rounded like any other number: at 1e7 in float32 it may be off by 1, and a
    # probability by a factor of e. Scores beyond the largest number of the type give NaN, or count
    # as hidden if they are negative.

    def _stacked_products(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """Return a b for every leading index: (B, H, M, K), (B, H, K, N) give (B, H, M, N).

        out: where to write it, if given; it may be a view.
        """
        return self.xp.matmul(a, b, out=out)

    @shapes(
        "q[BQHd] k[BKGd] v[BKGd] q_pos[Q] k_pos[K] -> y[BQHd] saved[BHQK]",
        flops="22BQHdK",
    )
    def attention_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Any]:
        """Return (y (B, Tq, H, d), probs (B, H, Tq, Tk), whose hidden part is 0)."""
        scores = self._visible(self._dots(q, k), q_pos, k_pos, q.shape[-1] ** -0.5)
        probs = self._normalised(scores)[0].astype(q.dtype, copy=False)
        return self._weighted(probs, v, q.dtype), probs

    @shapes(
        "dy[BQHd] q[BQHd] k[BKGd] v[BKGd] saved q_pos[Q] k_pos[K] out? -> "
        "dq[BQHd] dk[BKGd] dv[BKGd]",
        flops="42BQHdK",
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
        dprobs = self._dots(dy, v)
        probs = saved.astype(dprobs.dtype, copy=False)
        dscores = probs * (dprobs - (probs * dprobs).sum(axis=-1, keepdims=True)) * factor
        return self._gradients(dy, q, k, saved, dscores, results)

    @shapes(
        "q[BQHd] k[BKGd] v[BKGd] q_pos[Q] k_pos[K] -> y[BQHd]:sum stats[BHQ2]:sum",
        flops="22BQHdK",
    )
    def attention_block_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Array]:
        """Return (y (B, Tq, H, d), stats (B, H, Tq, 2)) over these keys; y = 0 without keys."""
        scores = self._visible(self._dots(q, k), q_pos, k_pos, q.shape[-1] ** -0.5)
        probs, stats = self._normalised(scores)
        return self._weighted(probs.astype(q.dtype, copy=False), v, self.accum_dtype), stats

    @shapes("y[BQHd]+ stats[BHQ2]+ y2[BQHd] stats2[BHQ2] ->", exact=True)
    def attention_merge(self, y: Array, stats: Array, y2: Array, stats2: Array) -> None:
        """Merge attention over a second set of keys into y and stats, float32 or wider.

        Each sum shrinks by exp(its largest score - the largest of both). The new y is the mean of y
        and y2, weighted by these sums.
        """
        assert y.shape == y2.shape, (y.shape, y2.shape)
        assert stats.shape == stats2.shape, (stats.shape, stats2.shape)
        assert y.dtype == stats.dtype == self.accum_dtype, (y.dtype, stats.dtype)
        top = self.xp.maximum(stats[..., 0], stats2[..., 0])
        with np.errstate(over="ignore"):  # a difference below all numbers is small enough
            own, other = (one[..., 1] * self.xp.exp(one[..., 0] - top) for one in (stats, stats2))
        total = own + other
        y *= (own / nonzero(total)).transpose(0, 2, 1)[..., None]
        y += (other / nonzero(total)).transpose(0, 2, 1)[..., None] * y2
        stats[..., 0], stats[..., 1] = top, total

    @shapes("dy[BQHd] y[BQHd] -> delta[BHQ]:sum")
    def attention_delta(self, dy: Array, y: Array) -> Array:
        """Return delta (B, H, Tq), the sum of dy y over a head, where y is over all keys."""
        assert dy.shape == y.shape, (dy.shape, y.shape)
        delta = (dy * y).sum(axis=-1, dtype=self.accum_dtype)
        return self.xp.ascontiguousarray(delta.transpose(0, 2, 1))

    @shapes(
        "dy[BQHd] q[BQHd] k[BKGd] v[BKGd] stats[BHQ2] delta[BHQ] q_pos[Q] k_pos[K] -> "
        "dq[BQHd]:sum dk[BKGd]:sum dv[BKGd]:sum",
        flops="52BQHdK",
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
        probs = self.xp.exp(scores - stats[..., :1]) / nonzero(stats[..., 1:])
        dscores = probs * (self._dots(dy, v) - delta[..., None]) * factor
        out = tuple(self.xp.empty(x.shape, self.accum_dtype) for x in (q, k, v))
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
        out = self.xp.empty((a.shape[0], a.shape[2], a.shape[1], b.shape[1]), self.accum_dtype)
        for one in self._members(a, b):
            self._stacked_products(_heads_first(a)[:, one], b.transpose(0, 2, 3, 1), out[:, one])
        return out

    def _visible(self, scores: Array, q_pos: Array, k_pos: Array, factor: float) -> Array:
        """Return factor scores (B, H, Tq, Tk), -inf where a query does not see a key."""
        visible = k_pos[None, :] <= q_pos[:, None]
        return self.xp.where(visible, scores * self.scalar(factor), self.scalar(-np.inf))

    def _normalised(self, scores: Array) -> tuple[Array, Array]:
        """Return (softmax of each row, 0 in a row of -inf; stats)."""
        top = self.xp.maximum(scores.max(axis=-1), self.neg_max)
        probs = self.xp.exp(scores - top[..., None])
        total = probs.sum(axis=-1)
        probs /= nonzero(total)[..., None]
        return probs, self.xp.stack([top, total], axis=-1)

    def _weighted(self, probs: Array, v: Array, dtype: DTypeLike) -> Array:
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
                    self.xp.empty(_heads_first(total).shape, self.accum_dtype),
                )
                for one in self._members(q, k)
            ]
            _heads_first(total)[...] = sum(parts)
        return dq, dk, dv


def _heads_first(x: Array) -> Array:
    """Return the view (B, H, T, d) of an array (B, T, H, d)."""
    return x.transpose(0, 2, 1, 3)


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
    turns = length * frequencies / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / factor)
