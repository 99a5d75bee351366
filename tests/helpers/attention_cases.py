"""Random arrays for tiled attention, and the expected results in float64."""

import numpy as np
from cuda_fused import BOUNDS, DTYPES, place, relative
from ops_cases import parts, positions_of

from mpipar.ops.cuda.attention import Attention

# (B, T, H, d) and the order of positions. Tiles are 16 to 128 tokens by 32, 64 or 128 of width.
# No shape fills them; some tiles are hidden, and some have more tokens than there are.
CASES = {
    "increasing": (2, 150, 2, 40),
    "shuffled": (1, 71, 2, 33),  # no address of 16 bytes
    "zigzag": (1, 133, 1, 128),
    "ties": (1, 7, 3, 64),
    "narrow": (1, 201, 1, 16),
}
# Values of 16 bits are rounded: p or ds before the last product, the result, and y before delta is
# computed from it. The errors are independent, so their squares add up.
ROUNDINGS = {"y": 2, "dq": 3, "dk": 3, "dv": 2}


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
    """Random arrays of one type and shape, and the float64 results of the same values."""

    def __init__(self, rng, dtype, shape, kind="increasing"):
        batch, tokens, heads, width = shape
        self.dtype, self.bound = DTYPES[dtype], BOUNDS[dtype]
        self.positions = positions_of(kind, tokens, rng)
        self.qkv, self.dy = (
            rng.standard_normal(size).astype(self.dtype)
            for size in ((batch, tokens, 3, heads, width), shape)
        )
        self.y, self.lse, *grads = formula(*parts(self.qkv), self.dy, *2 * [self.positions])
        self.dqkv = np.stack(grads, axis=2)

    def run(self, where):
        """Return host arrays y, lse, dqkv, with gradients written to the packed one."""
        xp, loader, to_device, to_host = place(where)
        qkv, dy, positions = map(to_device, (self.qkv, self.dy, self.positions))
        dqkv = to_device(np.full(self.qkv.shape, np.nan, self.dtype))
        y, lse, _ = both_passes(
            Attention(xp, loader), parts(qkv), dy, positions, positions, out=parts(dqkv)
        )
        return tuple(map(to_host, (y, lse, dqkv)))


class Grouped:
    """A case with fewer key heads than query heads and other tokens; some queries see no key.

    Keys are the first of a longer array, as in a cache.
    """

    def __init__(self, rng, dtype, sizes, positions=None):
        batch, queries, keys, heads, kv_heads, width = sizes
        self.dtype, self.bound = DTYPES[dtype], BOUNDS[dtype]
        self.q, self.dy, cache = (
            rng.standard_normal(shape).astype(self.dtype)
            for shape in (
                (batch, queries, heads, width),
                (batch, queries, heads, width),
                (batch, keys + 5, 2, kv_heads, width),
            )
        )
        cache[:, keys:] = np.nan
        self.cache, self.keys = cache, keys
        if positions is None:
            positions = rng.permutation(2 * keys)[:queries], rng.permutation(keys) + 3
            positions[0][queries // 2] = 1  # sees nothing
        self.q_pos, self.k_pos = positions
        k, v = self.kv(cache)
        self.y, self.lse, *self.grads = formula(self.q, k, v, self.dy, self.q_pos, self.k_pos)

    @classmethod
    def long(cls, rng, dtype, of_keys):
        """Many keys for three queries, or the reverse; the first 2,100 of the many see none.

        A block looks at 32 tiles at once, and must look twice before it finds one.
        """
        many, few = 2300, 3
        late = np.where(np.arange(many) < 2100, many, -1) + rng.permutation(many) % 7
        middle = many // 2 + np.arange(few)
        if of_keys:
            return cls(rng, dtype, (1, few, many, 1, 1, 8), (middle, late))
        return cls(rng, dtype, (1, many, few, 1, 1, 8), (-late, -middle))

    def kv(self, cache):
        """The views k and v of the cache."""
        return cache[:, : self.keys, 0], cache[:, : self.keys, 1]

    def run(self, where, wide):
        """Return host arrays (y, lse, dq, dk, dv)."""
        xp, loader, to_device, to_host = place(where)
        q, dy, cache, *positions = map(
            to_device, (self.q, self.dy, self.cache, self.q_pos, self.k_pos)
        )
        out = (
            None
            if wide
            else [
                to_device(np.full(x.shape, np.nan, self.dtype))
                for x in (self.q, *self.kv(self.cache))
            ]
        )
        y, lse, grads = both_passes(
            Attention(xp, loader), (q, *self.kv(cache)), dy, *positions, wide, out
        )
        return tuple(map(to_host, (y, lse, *grads)))


def both_passes(kernels, qkv, dy, q_pos, k_pos, wide=False, out=None):
    """(y, lse, (dq, dk, dv)) of the kernels."""
    y, stats = kernels.forward(*qkv, q_pos, k_pos, wide)
    delta = kernels.delta(dy, y)
    grads = kernels.backward(dy, *qkv, stats, delta, q_pos=q_pos, k_pos=k_pos, out=out)
    return y, lse_of(stats), grads


def check_forward(case, y, lse):
    """Raise AssertionError unless y and lse are those of the case."""
    assert (y.dtype, lse.dtype) == (case.dtype, np.float32)
    assert relative(y, case.y) <= case.bound * ROUNDINGS["y"] ** 0.5
    assert np.abs(lse - case.lse).max() <= 1e-5
