"""Attention from its definition in float64, and random arrays for it."""

import numpy as np
from helpers import assert_close

NAMES = ("y", "lse", "dq", "dk", "dv")


def formula(q, k, v, dy, q_pos, k_pos):
    """(y, lse, dq, dk, dv) of attention in float64, a head at a time, from its definition."""
    q, k, v, dy = (x.astype(np.float64) for x in (q, k, v, dy))
    y, lse = np.zeros(q.shape), np.full((len(q), q.shape[2], q.shape[1]), -np.inf)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    group, factor = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    for b, h, i in np.ndindex(lse.shape):
        own, seen = h // group, np.flatnonzero(k_pos <= q_pos[i])
        if not len(seen):
            continue
        scores = factor * k[b, seen, own] @ q[b, i, h]
        lse[b, h, i] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        p = np.exp(scores - lse[b, h, i])
        y[b, i, h] = p @ v[b, seen, own]
        dp = v[b, seen, own] @ dy[b, i, h]
        ds = factor * p * (dp - p @ dp)
        dq[b, i, h] = ds @ k[b, seen, own]
        dk[b, seen, own] += ds[:, None] * q[b, i, h]
        dv[b, seen, own] += p[:, None] * dy[b, i, h]
    return y, lse, dq, dk, dv


def lse_of(stats):
    """The log of the sum of exp(score), of the largest score and the sum beside it (..., 2)."""
    with np.errstate(divide="ignore"):
        return stats[..., 0] + np.log(stats[..., 1])


class Case:
    """Random q, k, v, dy of one type, and the expected results in float64.

    sizes: B, Tq, Tk, H, Hkv, d. positions: (q_pos, k_pos). Keys and values are the first of a
    longer array, as in a cache.
    """

    def __init__(self, rng, sizes, positions, dtype="float64"):
        batch, queries, keys, heads, kv_heads, width = sizes
        of_q, of_cache = (batch, queries, heads, width), (batch, keys + 5, 2, kv_heads, width)
        q, self.dy, cache = (
            rng.standard_normal(shape).astype(dtype) for shape in (of_q, of_q, of_cache)
        )
        cache[:, keys:] = np.nan
        self.qkv = (q, cache[:, :keys, 0], cache[:, :keys, 1])
        self.q_pos, self.k_pos = positions
        self.expected = formula(*self.qkv, self.dy, *positions)

    def saved(self, ops):
        """(y, None, dq, dk, dv) by the form that keeps probabilities, or what a device keeps."""
        y, saved = ops.attention_forward(*self.qkv, self.q_pos, self.k_pos)
        grads = ops.attention_backward_input(self.dy, *self.qkv, saved, self.q_pos, self.k_pos)
        return y, None, *grads

    def block(self, ops):
        """(y, lse, dq, dk, dv) by one call of the block form over all keys."""
        y, stats = ops.attention_block_forward(*self.qkv, self.q_pos, self.k_pos)
        delta = ops.attention_delta(self.dy, y)
        grads = ops.attention_block_backward(
            self.dy, *self.qkv, stats, delta, q_pos=self.q_pos, k_pos=self.k_pos
        )
        return y, lse_of(stats), *grads

    def check(self, found, tol=1e-12):
        """Compare (y, lse, dq, dk, dv); a query that sees no key has lse -inf in both."""
        for name, got, wanted in zip(NAMES, found, self.expected, strict=True):
            if got is not None:
                assert np.array_equal(np.isneginf(got), np.isneginf(wanted)), name
                seen = np.isfinite(wanted)
                assert_close(got[seen], wanted[seen], tol, name)


def many_keys(rng, dtype, of_keys):
    """Many keys for three queries, or the reverse; the first 2,100 of the many see none.

    A block looks at 32 tiles at once, and must look twice before it finds one.
    """
    many, few = 2300, 3
    late = np.where(np.arange(many) < 2100, many, -1) + rng.permutation(many) % 7
    middle = many // 2 + np.arange(few)
    if of_keys:
        return Case(rng, (1, few, many, 1, 1, 8), (middle, late), dtype)
    return Case(rng, (1, many, few, 1, 1, 8), (-late, -middle), dtype)
