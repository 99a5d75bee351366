"""Causal attention written plainly, for NumPy and CuPy alike: part of `ArrayOps`.

Arguments: q (B, Tq, H, d), k and v (B, Tk, Hkv, d), positions q_pos (Tq,) and k_pos (Tk,). B rows
of a batch, H heads of d elements. Query i sees key j if and only if k_pos[j] <= q_pos[i]. H is a
multiple of Hkv: query head h uses key and value head h // (H / Hkv). A query that sees no key gives
y = 0.

There are two forms, which differ in what they keep between forward and backward.
`attention_forward` and `attention_backward_input` keep the probabilities: four products backward.
The block form keeps only lse (B, H, Tq), the log of the sum of exp(score) over the keys. It
computes the probabilities again: five products backward.

The keys of one call of the block form may be some of all keys. Then `attention_merge` joins two
results, and gradients are sums. So y, lse and gradients of this form are float32 even if
activations have 16 bits. The caller who has joined them rounds once, by `copy`.
"""

import numpy as np

# Below any score, but finite: so its difference to the largest score is never inf - inf = NaN.
LOWEST = -1e30


class ArrayAttention:
    """Attention whose scores are whole arrays: product, mask, softmax, product."""

    def _stacked_products(self, a, b, out=None):
        """Return a b for every leading index: (B, H, M, K), (B, H, K, N) give (B, H, M, N).

        out: where to write it, if given; it may be a view.
        """
        return self.xp.matmul(a, b, out=out)

    def attention_forward(self, q, k, v, q_pos, k_pos):
        """Return (y (B, Tq, H, d), probs (B, H, Tq, Tk), whose hidden part is 0)."""
        probs = self._causal_softmax(self._dots(q, k), q_pos, k_pos, q.shape[-1] ** -0.5)
        probs = probs.astype(q.dtype, copy=False)
        return self._weighted(probs, v, q.dtype), probs

    def attention_backward_input(self, dy, q, k, v, saved, q_pos, k_pos, *, out=None):
        """Return (dq, dk, dv) of the probabilities that `attention_forward` saved.

        In each row, dscores = probs (dprobs - sum(probs dprobs)). out: three arrays to write to.
        """
        out = out or tuple(self.xp.empty(x.shape, x.dtype) for x in (q, k, v))
        factor = self.scalar(q.shape[-1] ** -0.5)
        dscores = self._softmax_backward(saved, self._dots(dy, v), factor)
        return self._gradients(dy, q, k, saved, dscores, out)

    def attention_block_forward(self, q, k, v, q_pos, k_pos):
        """Return (y (B, Tq, H, d), lse (B, H, Tq)) over these keys; no key: y = 0, lse = -inf."""
        scores = self._visible(self._dots(q, k), q_pos, k_pos, q.shape[-1] ** -0.5)
        probs, lse = self._normalised(scores)
        return self._weighted(probs.astype(q.dtype, copy=False), v, self.statistics), lse

    def attention_merge(self, y, lse, y2, lse2):
        """Write attention over both sets of keys over y and lse, which are float32 or wider.

        The new lse is log(exp(lse) + exp(lse2)). The new y is (y exp(lse) + y2 exp(lse2)), divided
        by the same sum.
        """
        assert y.shape == y2.shape, (y.shape, y2.shape)
        assert lse.shape == lse2.shape, (lse.shape, lse2.shape)
        assert y.dtype == lse.dtype == self.statistics, (y.dtype, lse.dtype)
        xp = self.xp
        top = xp.maximum(xp.maximum(lse, lse2), self.scalar(LOWEST))
        own, other = xp.exp(lse - top), xp.exp(lse2 - top)
        total = own + other
        filled = total + (total == 0)  # 1 where neither saw a key
        y *= (own / filled).transpose(0, 2, 1)[..., None]
        y += (other / filled).transpose(0, 2, 1)[..., None] * y2
        with np.errstate(divide="ignore"):
            lse[...] = top + xp.log(total)

    def attention_delta(self, dy, y):
        """Return delta (B, H, Tq), the sum of dy y over a head; y of all keys."""
        assert dy.shape == y.shape, (dy.shape, y.shape)
        delta = (dy * y).sum(axis=-1, dtype=self.statistics)
        return self.xp.ascontiguousarray(delta.transpose(0, 2, 1))

    def attention_block_backward(self, dy, q, k, v, lse, delta, *, q_pos, k_pos):
        """Return (dq, dk, dv) as far as they come from these keys; lse and delta are of all keys.

        In each row, probs = exp(scores - lse) and dscores = probs (dprobs - delta): Dao et al.
        2022.
        """
        factor = self.scalar(q.shape[-1] ** -0.5)
        scores = self._visible(self._dots(q, k), q_pos, k_pos, factor)
        # A query that sees no key has lse = -inf and scores of -inf; the difference would be NaN.
        probs = self.xp.exp(scores - self.xp.maximum(lse, self.scalar(LOWEST))[..., None])
        dscores = probs * (self._dots(dy, v) - delta[..., None]) * factor
        out = tuple(self.xp.empty(x.shape, self.statistics) for x in (q, k, v))
        return self._gradients(dy, q, k, probs.astype(q.dtype, copy=False), dscores, out)

    # The parts of both forms. A group is the query heads that share one key head.

    @staticmethod
    def _members(q, k):
        """Return a slice of the query heads for each place in a group: one head of each group."""
        group, rest = divmod(q.shape[2], k.shape[2])
        assert rest == 0, (q.shape, k.shape)
        return [slice(first, None, group) for first in range(group)]

    def _dots(self, a, b):
        """Return a b^T (B, H, Tq, Tk) of a (B, Tq, H, d) and b (B, Tk, Hkv, d)."""
        out = self.xp.empty((a.shape[0], a.shape[2], a.shape[1], b.shape[1]), self.statistics)
        for one in self._members(a, b):
            self._stacked_products(
                _heads_first(a)[:, one], b.transpose(0, 2, 3, 1), out[:, one])
        return out

    def _visible(self, scores, q_pos, k_pos, factor):
        """Return factor scores (B, H, Tq, Tk), -inf where a query does not see a key."""
        visible = k_pos[None, :] <= q_pos[:, None]
        return self.xp.where(visible, scores * self.scalar(factor), self.scalar(-np.inf))

    def _normalised(self, scores):
        """Return (softmax of each row, log of its sum of exp); a row of -inf: 0 and -inf."""
        top = self.xp.maximum(scores.max(axis=-1), self.scalar(LOWEST))
        probs = self.xp.exp(scores - top[..., None])
        total = probs.sum(axis=-1)
        probs /= (total + (total == 0))[..., None]
        with np.errstate(divide="ignore"):
            return probs, top + self.xp.log(total)

    def _causal_softmax(self, scores, q_pos, k_pos, factor):
        """Return softmax of factor scores over the keys that are seen, 0 elsewhere."""
        return self._normalised(self._visible(scores, q_pos, k_pos, factor))[0]

    def _softmax_backward(self, probs, dprobs, factor):
        """Return the gradient of the products q k^T."""
        return probs * (dprobs - (probs * dprobs).sum(axis=-1, keepdims=True)) * factor

    def _weighted(self, probs, v, dtype):
        """Return y = probs v (B, Tq, H, d) in a type."""
        batch, heads, queries, _ = probs.shape
        y = self.xp.empty((batch, queries, heads, v.shape[-1]), dtype)
        for one in self._members(y, v):
            self._stacked_products(probs[:, one], _heads_first(v), _heads_first(y)[:, one])
        return y

    def _gradients(self, dy, q, k, probs, dscores, out):
        """Write dq, dk, dv to the arrays `out` and return them."""
        dscores = dscores.astype(q.dtype, copy=False)
        for one in self._members(q, k):
            self._stacked_products(
                dscores[:, one], _heads_first(k), _heads_first(out[0])[:, one])
        for rows, right, total in ((dscores, q, out[1]), (probs, dy, out[2])):
            # A key's gradient is the sum over its group.
            parts = [self._stacked_products(
                rows[:, one].transpose(0, 1, 3, 2), _heads_first(right)[:, one],
                self.xp.empty(_heads_first(total).shape, self.statistics))
                for one in self._members(q, k)]
            _heads_first(total)[...] = sum(parts)
        return out


def _heads_first(x):
    """Return the view (B, H, T, d) of an array (B, T, H, d)."""
    return x.transpose(0, 2, 1, 3)
