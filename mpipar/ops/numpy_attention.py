"""Causal attention for the CPU, in tiles of queries: part of `NumpyOps`.

A tile of queries leaves out the keys that none of its queries may see. In training that is about
half of all products and exponentials. Some heads are copied first, each to a matrix of its own, and
turned where a product needs the transpose. BLAS multiplies these small matrices at up to twice the
rate of strided views. Letters and the two forms are those of `array_attention`. Here the block form
has the scores of one tile at a time. G = H / Hkv query heads share a key head.

Arrays are cut into parts first: some heads of one row or, where rows are short, all heads of R
rows. For a method that gets a part, H and Hkv are the heads of that part.
"""

import math
from collections import namedtuple

import numpy as np

from mpipar.ops.array_attention import LOWEST

# Queries of a tile. At T = 1024, 64 and 256 are equal within 5 %. Without tiles the hidden triangle
# is worked on as well: 1.5 times as long forward, and 1.7 times backward (bench.tiles).
QUERY_TILE = 64
# Scores of a tile of a part. The interpreter's time for a tile does not depend on its size. But
# twice as many scores do not stay in cache, together with the copies.
PART_SCORES = 1 << 17
# Elements behind each row of a turned matrix. Without them its rows are a power of two apart, which
# uses a part of the cache only: products take up to 1.4 times as long.
GAP = 16
TURN = 32  # tokens that are turned at once: their cache lines are still there for the next element

# queries: a slice. Keys from `keys` on are hidden from all of them, keys before `doubtful` from
# none; mask: 0 where a query sees a doubtful key, -inf elsewhere.
Tile = namedtuple("Tile", "queries keys doubtful mask")
# Where a part lies in arrays like q (B, T, H, d), like k (B, T, Hkv, d) and like lse (B, H, ...).
Part = namedtuple("Part", "of_q of_k of_lse")


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
        y = np.empty(q.shape, q.dtype)
        lse = np.empty((len(q), q.shape[2], q.shape[1]), q.dtype)
        tiles = _query_tiles(q_pos, k_pos, q.dtype)
        for part in _parts(q, k):
            self._attend_part(q[part.of_q], k[part.of_k], v[part.of_k], tiles, y[part.of_q],
                              lse[part.of_lse], None if probs is None else probs[part.of_lse])
        return y, lse

    def _attend_part(self, q, k, v, tiles, y, lse, probs):
        """Write y, lse and, if there is an array for them, the probabilities of a part."""
        kv_heads = k.shape[2]
        queries, keys = self._scaled(q, kv_heads), self._turned("keys", k)
        values, out = self._heads("values", v, kv_heads), _by_group(y, kv_heads)
        for tile in tiles:
            # `rows`: the array of scores (R H, .., Tk) whose rows `at` are the tile's. The
            # probabilities of a part lie together, so theirs is a view.
            if probs is None:
                at = slice(0, tile.queries.stop - tile.queries.start)
                rows = self._buffer("scores", (len(q) * q.shape[2], at.stop, tile.keys))
            else:
                rows, at = probs.reshape(-1, *probs.shape[2:]), tile.queries
                rows[:, at, tile.keys :] = 0
            scores = rows[:, at, : tile.keys]
            _write_scores(queries, keys, tile, scores)
            sums = self._softmax_tile(rows, at, tile.keys)
            lse[..., tile.queries] = sums.reshape(*lse.shape[:2], -1)
            np.matmul(_split(scores, queries), values[..., : tile.keys, :],
                      out=out[..., tile.queries, :])

    def _attend_with_one(self, q, k, v):
        """Return (y, lse) of one query in each row, which sees all keys: all rows at once."""
        batch, _, heads, _ = q.shape
        kv_heads, keys = k.shape[2], k.shape[1]
        scores = self._buffer("scores", (batch, kv_heads, heads // kv_heads, keys))
        np.matmul(self._scaled(q, kv_heads)[..., 0, :], k.transpose(0, 2, 3, 1), out=scores)
        rows = scores.reshape(1, batch * heads, keys)
        lse = self._softmax_tile(rows, slice(0, batch * heads), keys)
        y = scores @ v.transpose(0, 2, 1, 3)
        return y.reshape(q.shape), lse.reshape(batch, heads, 1)

    def _heads(self, name, x, kv_heads):
        """Return a copy (R, Hkv, G, T, d) of x (R, T, H, d) in the buffer `name`."""
        groups = _by_group(x, kv_heads)
        heads = self._buffer(name, groups.shape)
        np.copyto(heads, groups)
        return heads

    def _scaled(self, q, kv_heads):
        """Return q / sqrt(d) as `_heads` does."""
        groups, factor = _by_group(q, kv_heads), q.dtype.type(q.shape[-1] ** -0.5)
        return np.multiply(groups, factor, out=self._buffer("queries", groups.shape))

    def _turned(self, name, x):
        """Return a copy (R, Hkv, 1, d, T) of keys or values x (R, T, Hkv, d) in the buffer."""
        rows, tokens, kv_heads, width = x.shape
        turned = self._buffer(name, (rows, kv_heads, 1, width, tokens + GAP))[..., :tokens]
        groups = _by_group(x, kv_heads).swapaxes(-1, -2)
        for first in range(0, tokens, TURN):
            some = slice(first, first + TURN)
            turned[..., some] = groups[..., some]
        return turned

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
        def probs_of(part, queries, keys):
            rows = saved[part.of_lse].reshape(-1, *saved.shape[2:])

            def of_tile(tile, dprobs):
                self._softmax_backward_tile(rows, tile.queries, dprobs)
                return rows[:, tile.queries, : tile.keys]

            return of_tile

        return self._walk_back(dy, q, k, v, _query_tiles(q_pos, k_pos, q.dtype), probs_of, out)

    def attention_block_backward(self, dy, q, k, v, lse, delta, *, q_pos, k_pos):
        """Return (dq, dk, dv) as far as they come from these keys; lse and delta are of all."""
        lse = np.maximum(lse, q.dtype.type(LOWEST))  # of no key: see `array_attention`

        def probs_of(part, queries, keys):
            keys = self._turned("turned keys", keys)

            def of_tile(tile, dprobs):
                probs, sums = self._buffer("probs", dprobs.shape), (*dprobs.shape[:2], 1)
                _write_scores(queries, keys, tile, probs)
                probs -= lse[part.of_lse][..., tile.queries].reshape(sums)
                np.exp(probs, out=probs)
                dprobs -= delta[part.of_lse][..., tile.queries].reshape(sums)
                dprobs *= probs
                return probs

            return of_tile

        return self._walk_back(dy, q, k, v, _query_tiles(q_pos, k_pos, q.dtype), probs_of)

    def _softmax_backward_tile(self, probs, at, dprobs):
        """Write dscores over dprobs (R H, n, keys): by row, probs (dprobs - sum(probs dprobs))."""
        p = probs[:, at, : dprobs.shape[-1]]
        dprobs -= np.vecdot(dprobs, p)[..., None]
        dprobs *= p

    def _walk_back(self, dy, q, k, v, tiles, probs_of, out=None):
        """Return (dq, dk, dv).

        probs_of(Part, its queries as `_scaled` returns them, its k) returns a function of (tile,
        dprobs). That one writes dscores over dprobs (R H, n, keys), and returns the probabilities
        of the tile.
        """
        dq, dk, dv = out or tuple(np.empty(x.shape, x.dtype) for x in (q, k, v))
        for part in _parts(q, k):
            queries = self._scaled(q[part.of_q], k[part.of_k].shape[2])
            self._walk_part(
                dy[part.of_q], queries, k[part.of_k], v[part.of_k], tiles,
                probs_of(part, queries, k[part.of_k]),
                (dq[part.of_q], dk[part.of_k], dv[part.of_k]))
        return dq, dk, dv

    def _walk_part(self, dy, queries, k, v, tiles, probs_of_tile, out):
        """Write (dq, dk, dv) of a part to the arrays `out`."""
        dq, kv_heads, factor = out[0], k.shape[2], k.dtype.type(k.shape[-1] ** -0.5)
        dys, keys = self._heads("dy", dy, kv_heads), self._heads("keys", k, kv_heads)
        values = self._turned("values", v)
        sums = [self._buffer(name, keys[:, :, 0].shape) for name in ("dk", "dv")]
        # The last tile comes first: in training it reaches every key, so its products fill both.
        for tile in reversed(tiles):
            at, fresh = tile.queries, tile is tiles[-1]
            dscores = self._buffer("scores", (
                math.prod(queries.shape[:3]), at.stop - at.start, tile.keys))
            by_group = _split(dscores, queries)
            np.matmul(dys[..., at, :], values[..., : tile.keys], out=by_group)
            probs = _split(probs_of_tile(tile, dscores), queries)
            part_dq = self._buffer("dq", queries[..., at, :].shape)
            np.matmul(by_group, keys[..., : tile.keys, :], out=part_dq)
            np.multiply(part_dq, factor, out=_by_group(dq[:, at], kv_heads))
            self._add_to_keys(sums[0], by_group, queries[..., at, :], fresh)
            self._add_to_keys(sums[1], probs, dys[..., at, :], fresh)
        for whole, total in zip(out[1:], sums, strict=True):
            whole[...] = total.swapaxes(1, 2)

    def _add_to_keys(self, total, rows, right, fresh):
        """Add rows^T right, summed over each group, to total (R, Hkv, Tk, d); write it if fresh.

        rows (R, Hkv, G, n, keys), right (R, Hkv, G, n, d).
        """
        keys = rows.shape[-1]
        of_keys = total[:, :, :keys]
        if fresh:
            total[:, :, keys:] = 0
        for member in range(rows.shape[2]):
            left = rows[:, :, member].swapaxes(-1, -2)
            if fresh and member == 0:
                np.matmul(left, right[:, :, member], out=of_keys)
            else:
                part = self._buffer("part", total.shape)[:, :, :keys]
                np.matmul(left, right[:, :, member], out=part)
                of_keys += part


def _write_scores(queries, keys, tile, scores):
    """Write the scores of a tile (R H, n, keys), hidden pairs -inf.

    queries (R, Hkv, G, Tq, d) are scaled, keys (R, Hkv, 1, d, Tk) turned.
    """
    np.matmul(queries[..., tile.queries, :], keys[..., : tile.keys], out=_split(scores, queries))
    scores[..., tile.doubtful :] += tile.mask


def part_sizes(batch, queries, heads, keys, kv_heads):
    """Return (rows, heads of keys) of a part."""
    scores = heads // kv_heads * min(queries, QUERY_TILE) * keys
    most = max(1, PART_SCORES // max(1, scores))
    return max(1, min(batch, most // kv_heads)), min(most, kv_heads)


def _parts(q, k):
    """Return the Parts of q (B, Tq, H, d) and k (B, Tk, Hkv, d)."""
    (batch, queries, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
    assert heads % kv_heads == 0, (heads, kv_heads)
    some_rows, some_heads = part_sizes(batch, queries, heads, keys, kv_heads)
    parts, group, tokens = [], heads // kv_heads, slice(None)
    for row in range(0, batch, some_rows):
        for head in range(0, kv_heads, some_heads):
            rows, of_keys = slice(row, row + some_rows), slice(head, head + some_heads)
            of_queries = slice(group * head, group * (head + some_heads))
            parts.append(Part(
                (rows, tokens, of_queries), (rows, tokens, of_keys), (rows, of_queries)))
    return parts


def _by_group(x, kv_heads):
    """Return the view (R, Hkv, G, T, d) of x (R, T, H, d). H may be Hkv: then G = 1."""
    rows, tokens, heads, width = x.shape
    return x.reshape(rows, tokens, kv_heads, heads // kv_heads, width).transpose(0, 2, 3, 1, 4)


def _split(scores, queries):
    """Return the view (R, Hkv, G, n, keys) of scores (R H, n, keys) of queries (R, Hkv, G, ...)."""
    return scores.reshape(*queries.shape[:3], *scores.shape[1:])


def log_of_sum(top, total):
    """Return top + log(total), -inf where nothing was summed."""
    with np.errstate(divide="ignore"):
        return top + np.log(total)


def _query_tiles(q_pos, k_pos, dtype):
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
        visible = k_pos[None, doubtful:keys] <= q_pos[queries, None]
        mask = np.where(visible, 0.0, -np.inf).astype(dtype)
        tiles.append(Tile(queries, keys, doubtful, mask))
    return tiles
