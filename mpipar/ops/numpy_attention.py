"""Causal attention for the CPU in tiles of queries; letters and forms are those of `ArrayOps`.

A tile of queries leaves out the keys that none of its queries may see, which in training is about
half of all products and exponentials. Some heads are copied first, each to a matrix of its own,
transposed where a product needs it, because BLAS multiplies these small matrices at up to twice the
rate of strided views. Both directions must multiply queries and keys in the same way, since large
scores would otherwise differ in their last bits. The block form has the scores of one tile at a
time. G = H / Hkv query heads share a key head.

Arrays are divided into parts first: some heads of one row or, where rows are short, all heads of R
rows. In a method that gets a part, H and Hkv are the heads of that part.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.arrays import nonzero
from mpipar.ops.signature import Array, Shape, ThreeArrays

# Queries of a tile. At T = 1024, 64 and 256 are equal within 5 %. Without tiles the hidden triangle
# is computed as well, which takes 1.5 times as long forward, and 1.7 times backward.
QUERY_TILE = 64
# Scores of a tile of a part. The interpreter overhead of a tile does not depend on its size, but
# twice as many scores do not stay in cache together with the copies.
PART_SCORES = 1 << 17
# Elements after each row of a transposed matrix. Without them its rows are a power of two apart,
# which uses only a part of the cache: products take up to 1.4 times as long.
GAP = 16
TURN = 32  # tokens transposed at once: their cache lines are still there for the next element


class Tile(NamedTuple):
    """Queries of attention that are handled together.

    Keys from `keys` on are hidden from all of them, keys before `doubtful` from none. mask: 0 where
    a query sees a doubtful key, -inf elsewhere.
    """

    queries: slice
    keys: int
    doubtful: int
    mask: Array


class NumpyAttention(ArrayOps):
    """The base of `NumpyOps`: attention, in buffers that belong to the object.

    Constants bound their size.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        super().__init__(np, dtype, "cpu")
        self._buffers: dict[str, np.ndarray] = {}

    def _buffer(self, name: str, shape: Shape) -> np.ndarray:
        """Return an uninitialised array that the next call with this name overwrites."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.empty(size, self.dtype)
        return self._buffers[name][:size].reshape(shape)

    def attention_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Any]:
        """Return (y (B, Tq, H, d), probs (B, H, Tq, Tk), whose hidden part is 0)."""
        probs = np.empty((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), q.dtype)
        y, _ = self._attend(q, k, v, q_pos, k_pos, probs)
        return y, probs

    def attention_block_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Array]:
        """Return (y (B, Tq, H, d), stats (B, H, Tq, 2)) over these keys; y = 0 without keys."""
        return self._attend(q, k, v, q_pos, k_pos)

    def _attend(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array, probs: Array | None = None
    ) -> tuple[Array, Array]:
        """Return (y, stats), and write the probabilities to `probs` if it is given."""
        y = np.empty(q.shape, q.dtype)
        stats = np.empty((len(q), q.shape[2], q.shape[1], 2), q.dtype)
        tiles = _query_tiles(q_pos, k_pos, q.dtype)
        for of_q, of_k, of_rows in _parts(q, k):
            kv_heads = k[of_k].shape[2]
            queries = self._scaled(q[of_q], kv_heads)
            keys = self._transposed("keys", k[of_k], q.shape[1])
            # One query, as in generation, reads each value once: a copy would not pay off.
            values = _by_group(v[of_k], kv_heads)
            if q.shape[1] > 1:
                values = self._heads("values", v[of_k], kv_heads)
            out, of_stats = _by_group(y[of_q], kv_heads), stats[of_rows]
            for tile in tiles:
                # `rows`: the array of scores (R H, .., Tk) whose rows `at` are the tile's. The
                # probabilities of a part are contiguous, so theirs is a view.
                if probs is None:
                    at = slice(0, tile.queries.stop - tile.queries.start)
                    shape = math.prod(queries.shape[:3]), at.stop, tile.keys
                    rows = self._buffer("scores", shape)
                else:
                    rows, at = probs[of_rows].reshape(-1, *probs.shape[2:]), tile.queries
                    rows[:, at, tile.keys :] = 0
                scores = rows[:, at, : tile.keys]
                _write_scores(queries, keys, tile, scores)
                for which, one in enumerate(self._softmax_tile(rows, at, tile.keys)):
                    of_stats[..., tile.queries, which] = one.reshape(*of_stats.shape[:2], -1)
                np.matmul(
                    _split(scores, queries),
                    values[..., : tile.keys, :],
                    out=out[..., tile.queries, :],
                )
        return y, stats

    def _heads(self, name: str, x: Array, kv_heads: int) -> Array:
        """Return a copy (R, Hkv, G, T, d) of x (R, T, H, d) in the buffer `name`."""
        groups = _by_group(x, kv_heads)
        heads = self._buffer(name, groups.shape)
        np.copyto(heads, groups)
        return heads

    def _scaled(self, q: Array, kv_heads: int) -> Array:
        """Return q / sqrt(d) as `_heads` does."""
        groups, factor = _by_group(q, kv_heads), q.dtype.type(q.shape[-1] ** -0.5)
        return np.multiply(groups, factor, out=self._buffer("queries", groups.shape))

    def _transposed(self, name: str, x: Array, queries: int) -> Array:
        """Return a transposed copy (R, Hkv, 1, d, T) of keys or values x (R, T, Hkv, d), buffered.

        For a single query it is a view.
        """
        rows, tokens, kv_heads, width = x.shape
        groups = _by_group(x, kv_heads).swapaxes(-1, -2)
        if queries == 1:
            return groups
        turned = self._buffer(name, (rows, kv_heads, 1, width, tokens + GAP))[..., :tokens]
        for first in range(0, tokens, TURN):
            some = slice(first, first + TURN)
            turned[..., some] = groups[..., some]
        return turned

    def _softmax_tile(self, rows: Array, at: slice, keys: int) -> tuple[Array, Array]:
        """Write softmax over the scores rows[:, at, :keys] (R H, n, keys).

        Return the largest score and the sum of exp(score - largest), both (R H, n).
        """
        p = rows[:, at, :keys]
        top = p.max(axis=-1, initial=self.neg_max)
        p -= top[..., None]
        np.exp(p, out=p)
        with np.errstate(all="ignore"):  # BLAS may raise flags for numbers beside these
            total = self._row_sums(p)
        p *= np.reciprocal(nonzero(total))[..., None]
        return top, total

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

        out: three arrays to write to.
        """
        return self._backward(dy, q, k, v, _query_tiles(q_pos, k_pos, q.dtype), saved, out=out)

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

        The sums divide dy and delta instead of each exp(score - largest), because probabilities
        only occur in products with these.
        """
        share = np.reciprocal(nonzero(stats[..., 1]))
        again = stats[..., 0], share, delta * share
        return self._backward(dy, q, k, v, _query_tiles(q_pos, k_pos, q.dtype), again)

    def _softmax_backward_tile(self, probs: Array, at: slice, dprobs: Array) -> None:
        """Write dscores over dprobs (R H, n, keys): by row, probs (dprobs - sum(probs dprobs))."""
        p = probs[:, at, : dprobs.shape[-1]]
        dprobs -= np.vecdot(dprobs, p)[..., None]
        dprobs *= p

    def _backward(
        self,
        dy: Array,
        q: Array,
        k: Array,
        v: Array,
        tiles: list[Tile],
        saved: Array | ThreeArrays,
        out: ThreeArrays | None = None,
    ) -> ThreeArrays:
        """Return (dq, dk, dv).

        saved: the probabilities or, to compute them from again, the largest score, 1 / sum and
        delta / sum of each row.
        """
        dq, dk, dv = out or tuple(np.empty(x.shape, x.dtype) for x in (q, k, v))
        factor = k.dtype.type(k.shape[-1] ** -0.5)
        for of_q, of_k, of_rows in _parts(q, k):
            kv_heads = k[of_k].shape[2]
            queries = self._scaled(q[of_q], kv_heads)
            dys = self._heads("dy", dy[of_q], kv_heads)
            if not isinstance(saved, tuple):
                rows = saved[of_rows].reshape(-1, *saved.shape[2:])
            else:
                top, share, delta = (x[of_rows] for x in saved)
                turned = self._transposed("turned keys", k[of_k], q.shape[1])
                dys *= share.reshape(*dys.shape[:-1], 1)
            keys = self._heads("keys", k[of_k], kv_heads)
            values = self._transposed("values", v[of_k], q.shape[1])
            sums = [self._buffer(name, keys[:, :, 0].shape) for name in ("dk", "dv")]
            # The last tile comes first: in training it reaches every key, so its products fill both
            # sums.
            for tile in reversed(tiles):
                at, fresh = tile.queries, tile is tiles[-1]
                shape = math.prod(queries.shape[:3]), at.stop - at.start, tile.keys
                dscores = self._buffer("scores", shape)
                by_group = _split(dscores, queries)
                np.matmul(dys[..., at, :], values[..., : tile.keys], out=by_group)  # dprobs
                if not isinstance(saved, tuple):
                    probs = rows[:, at, : tile.keys]
                    self._softmax_backward_tile(rows, at, dscores)
                else:
                    probs = self._buffer("probs", shape)
                    _write_scores(queries, turned, tile, probs)
                    probs -= top[..., at].reshape(*shape[:2], 1)
                    np.exp(probs, out=probs)
                    dscores -= delta[..., at].reshape(*shape[:2], 1)
                    dscores *= probs
                part_dq = self._buffer("dq", queries[..., at, :].shape)
                np.matmul(by_group, keys[..., : tile.keys, :], out=part_dq)
                np.multiply(part_dq, factor, out=_by_group(dq[of_q][:, at], kv_heads))
                self._add_to_keys(sums[0], by_group, queries[..., at, :], fresh)
                self._add_to_keys(sums[1], _split(probs, queries), dys[..., at, :], fresh)
            for whole, total in zip((dk, dv), sums, strict=True):
                whole[of_k] = total.swapaxes(1, 2)
        return dq, dk, dv

    def _add_to_keys(self, total: Array, rows: Array, right: Array, fresh: bool) -> None:
        """Add rows^T right, summed over each group, to total (R, Hkv, Tk, d), or write it if fresh.

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


def _write_scores(queries: Array, keys: Array, tile: Tile, scores: Array) -> None:
    """Write the scores of a tile (R H, n, keys), -inf for hidden pairs.

    queries (R, Hkv, G, Tq, d) are scaled, keys (R, Hkv, 1, d, Tk) transposed.
    """
    np.matmul(queries[..., tile.queries, :], keys[..., : tile.keys], out=_split(scores, queries))
    scores[..., tile.doubtful :] += tile.mask


def part_sizes(batch: int, queries: int, heads: int, keys: int, kv_heads: int) -> tuple[int, int]:
    """Return (rows, key heads) of a part."""
    scores = heads // kv_heads * min(queries, QUERY_TILE) * keys
    most = max(1, PART_SCORES // max(1, scores))
    return max(1, min(batch, most // kv_heads)), min(most, kv_heads)


def _parts(q: Array, k: Array) -> Iterator[tuple[tuple[slice, ...], ...]]:
    """Yield the places of each part in q (B, Tq, H, d), k (B, Tk, Hkv, d) and stats (B, H, ...)."""
    (batch, queries, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
    assert heads % kv_heads == 0, (heads, kv_heads)
    some_rows, some_heads = part_sizes(batch, queries, heads, keys, kv_heads)
    group, tokens = heads // kv_heads, slice(None)
    for row in range(0, batch, some_rows):
        for head in range(0, kv_heads, some_heads):
            rows, of_keys = slice(row, row + some_rows), slice(head, head + some_heads)
            of_queries = slice(group * head, group * (head + some_heads))
            yield (rows, tokens, of_queries), (rows, tokens, of_keys), (rows, of_queries)


def _by_group(x: Array, kv_heads: int) -> Array:
    """Return the view (R, Hkv, G, T, d) of x (R, T, H, d). If H is Hkv, G is 1."""
    rows, tokens, heads, width = x.shape
    return x.reshape(rows, tokens, kv_heads, heads // kv_heads, width).transpose(0, 2, 3, 1, 4)


def _split(scores: Array, queries: Array) -> Array:
    """Return the view (R, Hkv, G, n, keys) of scores (R H, n, keys) of queries (R, Hkv, G, ...)."""
    return scores.reshape(*queries.shape[:3], *scores.shape[1:])


def _query_tiles(q_pos: Array, k_pos: Array, dtype: DTypeLike) -> list[Tile]:
    """Return the Tiles of queries.

    Only if keys are in order is it known, without looking at each pair, which of them are hidden.
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
