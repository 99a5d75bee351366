"""Causal attention for the CPU, in tiles of queries.

A tile of queries leaves out the keys that all of its queries may not see, about half of all
products and exponentials. The packed arrays are cut by strided views, which BLAS takes as they are:
nothing is transposed or copied. B T H d as in `array_ops`.
"""

import numpy as np

# Queries of a tile. 64 and 128 are equal within 5 %; 256 (no tiles at T = 256) works on the hidden
# triangle as well and takes 13 % longer forward, 28 % longer backward.
QUERY_TILE = 64


def softmax(probs, tile, keys):
    """Write softmax over the scores in probs[:, tile, :keys]; probs (H, T, T)."""
    p = probs[:, tile, :keys]
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p *= np.reciprocal(p @ np.ones(keys, p.dtype))[..., None]


def softmax_backward(dprobs, probs, tile):
    """Write dscores over dprobs (H, n, keys): of a row, probs (dprobs - sum(probs dprobs))."""
    p = probs[:, tile, : dprobs.shape[-1]]
    dprobs -= np.vecdot(dprobs, p)[..., None]
    dprobs *= p


def forward(qkv, positions, buffer, softmax=softmax):
    """Return (y (B, T, H, d), probs (B, H, T, T)).

    `buffer(name, shape)` lends scratch arrays; `softmax` may be another one than NumPy's.
    """
    batch, tokens, _, heads, width = qkv.shape
    y = np.empty((batch, tokens, heads, width), qkv.dtype)
    probs = np.empty((batch, heads, tokens, tokens), qkv.dtype)
    factor = qkv.dtype.type(width**-0.5)
    for tile, keys, doubtful in _query_tiles(positions):
        visible = positions[None, doubtful:keys] <= positions[tile, None]
        mask = np.where(visible, 0.0, -np.inf).astype(qkv.dtype)
        for one in range(batch):
            q, k, v = _heads_first(qkv[one])
            probs[one, :, tile, keys:] = 0
            p = probs[one, :, tile, :keys]
            scaled = buffer("query", q[:, tile].shape)
            np.multiply(q[:, tile], factor, out=scaled)
            np.matmul(scaled, k[:, :keys].transpose(0, 2, 1), out=p)
            p[..., doubtful:] += mask
            softmax(probs[one], tile, keys)
            np.matmul(p, v[:, :keys], out=y[one].transpose(1, 0, 2)[:, tile])
    return y, probs


def backward_input(dy, qkv, probs, positions, buffer, softmax_backward=softmax_backward):
    """Return dqkv (B, T, 3, H, d); `buffer` and `softmax_backward` as in `forward`."""
    dqkv = np.empty(qkv.shape, qkv.dtype)
    tokens = len(positions)
    # From the last tile on: it reaches every key, so its products fill dk and dv to be added to.
    for tile, keys, _ in reversed(_query_tiles(positions)):
        for one in range(len(qkv)):
            q, k, v = _heads_first(qkv[one])
            dq, dk, dv = _heads_first(dqkv[one])
            p, g = probs[one, :, tile, :keys], dy[one].transpose(1, 0, 2)[:, tile]
            ds = buffer("scores", p.shape)
            np.matmul(g, v[:, :keys].transpose(0, 2, 1), out=ds)
            softmax_backward(ds, probs[one], tile)
            np.matmul(ds, k[:, :keys], out=dq[:, tile])
            for rows, right, out in ((p, g, dv), (ds, q[:, tile], dk)):
                if tile.stop == tokens:
                    np.matmul(rows.transpose(0, 2, 1), right, out=out)
                else:
                    part = buffer("keys", out[:, :keys].shape)
                    np.matmul(rows.transpose(0, 2, 1), right, out=part)
                    out[:, :keys] += part
    dqkv[:, :, :2] *= qkv.dtype.type(qkv.shape[-1] ** -0.5)  # dq and dk
    return dqkv


def _heads_first(packed):
    """Return the three views (H, T, d) of one packed (T, 3, H, d) array."""
    return tuple(packed[:, i].transpose(1, 0, 2) for i in range(3))


def _query_tiles(positions):
    """Return (slice of queries, keys, doubtful) for each tile.

    Keys from `keys` on are hidden from all queries of the tile, keys before `doubtful` from none.
    Known without a look at each pair only if positions increase: then query i sees keys 0 to i.
    """
    tokens = len(positions)
    increasing = bool(np.all(positions[1:] > positions[:-1]))
    tiles = []
    for first in range(0, tokens, QUERY_TILE):
        stop = min(first + QUERY_TILE, tokens)
        keys, doubtful = (stop, first) if increasing else (tokens, 0)
        tiles.append((slice(first, stop), keys, doubtful))
    return tiles
