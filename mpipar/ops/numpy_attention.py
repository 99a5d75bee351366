"""Causal attention for the CPU, in tiles of queries: part of `NumpyOps`.

A tile of queries leaves out the keys that none of its queries may see. In training that is about
half of all products and exponentials. Heads are cut by strided views, which BLAS takes as they are,
so nothing is transposed or copied. Letters and the two forms are those of `array_attention`. Here
the block form has the scores of one tile at a time. G = H / Hkv query heads share a key head.
Where rows are short, a tile has the queries of several rows: R of them.
"""

from collections import namedtuple

import numpy as np

from mpipar.ops.array_attention import LOWEST

# Queries of a tile. 64 and 128 are equal within 5 %. 256 (no tiles at T = 256) works on the hidden
# triangle as well: it takes 13 % longer forward and 28 % longer backward.
QUERY_TILE = 64
# Scores of the rows that are worked on together. The interpreter's time for a tile does not depend
# on its size, and short rows have small tiles.
ROW_SCORES = 1 << 17

# queries: a slice. Keys from `keys` on are hidden from all of them, keys before `doubtful` from
# none.
Tile = namedtuple("Tile", "queries keys doubtful")


class NumpyAttention:
    """The tiled functions. The class they belong to lends scratch by `_buffer(name, shape)`."""

    def attention_forward(self, q, k, v, q_pos, k_pos):
        """Return (y (B, Tq, H, d), probs (B, H, Tq, Tk), whose hidden part is 0)."""
        probs = np.empty((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), q.dtype)
        y, _ = self._attend(q, k, v, q_pos, k_pos, probs)
        return y, probs

    def attention_block_forward(self, q, k, v, q_pos, k_pos):
        """Return (y (B, Tq, H, d), lse (B, H, Tq)) over these keys; no key: y = 0, lse = -inf."""
        return self._attend(q, k, v, q_pos, k_pos)

    def _attend(self, q, k, v, q_pos, k_pos, probs=None):
        """Return (y, lse), and write the probabilities to `probs` if it is given."""
        if probs is None and len(q_pos) == 1 and k_pos.max() <= q_pos[0]:
            return self._attend_with_one(q, k, v)
        y, heads = np.empty(q.shape, q.dtype), q.shape[2]
        lse = np.empty((len(q), heads, q.shape[1]), q.dtype)
        for tile in _query_tiles(q_pos, k_pos):
            mask = _mask(tile, q_pos, k_pos, q.dtype)
            for part in _row_parts(q, k):
                # `rows`: the array of scores (R H, .., Tk) whose rows `at` are the tile's.
                out, kv_heads = y[part, tile.queries], k.shape[2]
                if probs is None:
                    at = slice(0, out.shape[1])
                    rows = self._buffer("scores", (len(out) * heads, at.stop, tile.keys))
                else:
                    rows, at = probs[part].reshape(-1, *probs.shape[2:]), tile.queries
                    rows[:, at, tile.keys :] = 0
                scores = rows[:, at, : tile.keys]
                self._write_scores(q[part], k[part], tile, mask, scores)
                sums = self._softmax_tile(rows, at, tile.keys)
                lse[part, :, tile.queries] = sums.reshape(len(out), heads, -1)
                v_heads = _by_group(v[part, : tile.keys], kv_heads)
                np.matmul(_split(scores, len(out), kv_heads), v_heads,
                          out=_by_group(out, kv_heads))
        return y, lse

    def _attend_with_one(self, q, k, v):
        """Return (y, lse) of one query in each row, which sees all keys: all rows at once."""
        batch, _, heads, width = q.shape
        kv_heads, keys = k.shape[2], k.shape[1]
        scaled = self._scaled(q.reshape(batch, kv_heads, heads // kv_heads, width))
        scores = self._buffer("scores", (batch, kv_heads, heads // kv_heads, keys))
        np.matmul(scaled, k.transpose(0, 2, 3, 1), out=scores)
        rows = scores.reshape(1, batch * heads, keys)
        lse = self._softmax_tile(rows, slice(0, batch * heads), keys)
        y = scores @ v.transpose(0, 2, 1, 3)
        return y.reshape(q.shape), lse.reshape(batch, heads, 1)

    def _write_scores(self, q, k, tile, mask, scores):
        """Write q k^T / sqrt(d) of a tile, hidden pairs -inf.

        q (R, Tq, H, d), k (R, Tk, Hkv, d), scores (R H, n, keys).
        """
        kv_heads = k.shape[2]
        scaled = self._scaled(_by_group(q[:, tile.queries], kv_heads))
        k_heads = _by_group(k[:, : tile.keys], kv_heads)
        np.matmul(scaled, k_heads.swapaxes(-1, -2), out=_split(scores, len(q), kv_heads))
        scores[..., tile.doubtful :] += mask

    def _scaled(self, q_heads):
        """Return q_heads / sqrt(d) in a buffer."""
        factor = q_heads.dtype.type(q_heads.shape[-1] ** -0.5)
        return np.multiply(q_heads, factor, out=self._buffer("query", q_heads.shape))

    def _softmax_tile(self, rows, at, keys):
        """Write softmax over the scores rows[:, at, :keys] (R H, n, keys); return lse (R H, n)."""
        p = rows[:, at, :keys]
        top = p.max(axis=-1, initial=LOWEST)
        p -= top[..., None]
        np.exp(p, out=p)
        with np.errstate(all="ignore"):  # BLAS may raise flags for numbers beside these
            total = p @ np.ones(keys, p.dtype)
        p *= np.reciprocal(total + (total == 0))[..., None]
        return log_of_sum(top, total)

    def attention_backward_input(self, dy, q, k, v, saved, q_pos, k_pos, *, out=None):
        """Return (dq, dk, dv) of the probabilities that `attention_forward` saved.

        out: three arrays to write to.
        """
        def probs_of(part, tile, dprobs):
            rows = saved[part].reshape(-1, *saved.shape[2:])
            self._softmax_backward_tile(rows, tile.queries, dprobs)
            return rows[:, tile.queries, : tile.keys]

        return self._walk_back(dy, q, k, v, _query_tiles(q_pos, k_pos), probs_of, out)

    def attention_block_backward(self, dy, q, k, v, lse, delta, *, q_pos, k_pos):
        """Return (dq, dk, dv) as far as they come from these keys; lse and delta are of all."""
        lse = np.maximum(lse, q.dtype.type(LOWEST))  # of no key: see `array_attention`

        def probs_of(part, tile, dprobs):
            probs, sums = self._buffer("probs", dprobs.shape), (*dprobs.shape[:2], 1)
            self._write_scores(
                q[part], k[part], tile, _mask(tile, q_pos, k_pos, q.dtype), probs)
            probs -= lse[part, :, tile.queries].reshape(sums)
            np.exp(probs, out=probs)
            dprobs -= delta[part, :, tile.queries].reshape(sums)
            dprobs *= probs
            return probs

        return self._walk_back(dy, q, k, v, _query_tiles(q_pos, k_pos), probs_of)

    def _softmax_backward_tile(self, probs, at, dprobs):
        """Write dscores over dprobs (R H, n, keys): by row, probs (dprobs - sum(probs dprobs))."""
        p = probs[:, at, : dprobs.shape[-1]]
        dprobs -= np.vecdot(dprobs, p)[..., None]
        dprobs *= p

    def _walk_back(self, dy, q, k, v, tiles, probs_of, out=None):
        """Return (dq, dk, dv).

        probs_of(rows of the batch, tile, dprobs): writes dscores over dprobs (R H, n, keys), and
        returns the probabilities of the tile.
        """
        dq, dk, dv = out or tuple(np.empty(x.shape, x.dtype) for x in (q, k, v))
        heads, kv_heads, factor = q.shape[2], k.shape[2], q.dtype.type(q.shape[-1] ** -0.5)
        # The last tile comes first: in training it reaches every key, so its products fill dk, dv.
        for tile in reversed(tiles):
            for part in _row_parts(q, k):
                q_heads, dy_heads, dq_heads = (
                    _by_group(x[part, tile.queries], kv_heads) for x in (q, dy, dq))
                k_heads, v_heads = (_by_group(x[part, : tile.keys], kv_heads) for x in (k, v))
                count, queries = len(q_heads), q_heads.shape[-2]
                dscores = self._buffer("scores", (count * heads, queries, tile.keys))
                by_group = _split(dscores, count, kv_heads)
                np.matmul(dy_heads, v_heads.swapaxes(-1, -2), out=by_group)
                probs = _split(probs_of(part, tile, dscores), count, kv_heads)
                np.matmul(by_group, k_heads, out=dq_heads)
                dq_heads *= factor
                fresh = tile is tiles[-1]
                self._add_to_keys(dk[part], by_group, self._scaled(q_heads), fresh)
                self._add_to_keys(dv[part], probs, dy_heads, fresh)
        return dq, dk, dv

    def _add_to_keys(self, total, rows, right, fresh):
        """Add rows^T right, summed over each group, to total (R, Tk, Hkv, d); write it if fresh.

        rows (R, Hkv, G, n, keys), right (R, Hkv, G, n, d).
        """
        keys = rows.shape[-1]
        of_keys = total[:, :keys].swapaxes(1, 2)
        if fresh:
            total[:, keys:] = 0
        for member in range(rows.shape[2]):
            left = rows[:, :, member].swapaxes(-1, -2)
            if fresh and member == 0:
                np.matmul(left, right[:, :, member], out=of_keys)
            else:
                part = self._buffer("keys", of_keys.shape)
                np.matmul(left, right[:, :, member], out=part)
                of_keys += part


def rows_at_once(batch, queries, heads, keys):
    """Return the number of rows of a batch that are worked on together."""
    scores = heads * min(queries, QUERY_TILE) * keys
    return max(1, min(batch, ROW_SCORES // max(1, scores)))


def _row_parts(q, k):
    """Return slices of the batch; q (B, Tq, H, d), k (B, Tk, ...)."""
    count = rows_at_once(*q.shape[:3], k.shape[1])
    return [slice(first, first + count) for first in range(0, len(q), count)]


def _by_group(x, kv_heads):
    """Return the view (R, Hkv, G, T, d) of x (R, T, H, d). H may be Hkv: then G = 1."""
    rows, tokens, heads, width = x.shape
    return x.reshape(rows, tokens, kv_heads, heads // kv_heads, width).transpose(0, 2, 3, 1, 4)


def _split(scores, count, kv_heads):
    """Return the view (R, Hkv, G, n, keys) of scores (R H, n, keys) of R = count rows."""
    heads, *tile = scores.shape
    return scores.reshape(count, kv_heads, heads // count // kv_heads, *tile)


def log_of_sum(top, total):
    """Return top + log(total), -inf where nothing was summed."""
    with np.errstate(divide="ignore"):
        return top + np.log(total)


def _query_tiles(q_pos, k_pos):
    """Return the Tiles of queries.

    Only if keys lie in order is it known, without a look at each pair, which of them are hidden.
    """
    assert min(len(q_pos), len(k_pos)) > 0, (len(q_pos), len(k_pos))
    in_order, tiles = bool(np.all(k_pos[1:] >= k_pos[:-1])), []
    for first in range(0, len(q_pos), QUERY_TILE):
        queries = slice(first, min(first + QUERY_TILE, len(q_pos)))
        doubtful, keys = 0, len(k_pos)
        if in_order:
            ends = q_pos[queries].min(), q_pos[queries].max()
            doubtful, keys = np.searchsorted(k_pos, ends, side="right").tolist()
        tiles.append(Tile(queries, keys, doubtful))
    return tiles


def _mask(tile, q_pos, k_pos, dtype):
    """Return 0 where a query of the tile sees a doubtful key, -inf elsewhere."""
    visible = k_pos[None, tile.doubtful : tile.keys] <= q_pos[tile.queries, None]
    return np.where(visible, 0.0, -np.inf).astype(dtype)
