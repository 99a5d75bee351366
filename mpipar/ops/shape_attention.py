"""Attention on shapes only: FLOPs of the full square, the convention of published model FLOPs.

Letters and the two forms are those of `array_attention`.
"""

from mpipar.ops.numpy_attention import QUERY_TILE, rows_at_once


class ShapeAttention:
    """Each function allocates what the one of `NumpyAttention` or the fused kernels allocates."""

    def attention_forward(self, q, k, v, q_pos, k_pos):
        """Return (y (B, Tq, H, d), probs (B, H, Tq, Tk) or, in tiles, (y, lse)); two products."""
        scores = self._scores(2, q, k, v, q_pos, k_pos)
        y = self.empty(q.shape, q.dtype)
        if q.shape[-1] <= self.tiled_head_width:
            return y, (y, self.empty(scores[:-1], self.statistics))
        return y, self.empty(scores, q.dtype)

    def attention_backward_input(self, dy, q, k, v, saved, q_pos, k_pos, *, out=None):
        """Return (dq, dk, dv), or `out`; four products."""
        scores = self._scores(4, q, k, v, q_pos, k_pos)
        self._lend_tiles(q, k, "scores")
        assert dy.shape == q.shape, (dy.shape, q.shape)
        if q.shape[-1] > self.tiled_head_width:
            assert saved.shape == scores, (saved.shape, scores)
        if out is None:
            return tuple(self.empty(x.shape, x.dtype) for x in (q, k, v))
        for given, x in zip(out, (q, k, v), strict=True):
            assert given.shape == x.shape, (given.shape, x.shape)
        return out

    def attention_block_forward(self, q, k, v, q_pos, k_pos):
        """Return (y (B, Tq, H, d), lse (B, H, Tq)); two products."""
        scores = self._scores(2, q, k, v, q_pos, k_pos)
        self._lend_tiles(q, k, "scores")
        return self.empty(q.shape, self.statistics), self.empty(scores[:-1], self.statistics)

    def attention_merge(self, y, lse, y2, lse2):
        """Check the shapes."""
        assert y.shape == y2.shape, (y.shape, y2.shape)
        assert lse.shape == lse2.shape, (lse.shape, lse2.shape)

    def attention_delta(self, dy, y):
        """Return delta (B, H, Tq)."""
        assert dy.shape == y.shape, (dy.shape, y.shape)
        batch, queries, heads, _ = y.shape
        return self.empty((batch, heads, queries), self.statistics)

    def attention_block_backward(self, dy, q, k, v, lse, delta, *, q_pos, k_pos):
        """Return (dq, dk, dv); five products, one of which makes the scores again."""
        scores = self._scores(5, q, k, v, q_pos, k_pos)
        self._lend_tiles(q, k, "scores", "probs")
        assert dy.shape == q.shape, (dy.shape, q.shape)
        assert lse.shape == delta.shape == scores[:-1], (lse.shape, delta.shape, scores)
        return tuple(self.empty(x.shape, self.statistics) for x in (q, k, v))

    def _lend_tiles(self, q, k, *of_scores):
        """Count the buffers of a tile of queries, and that of its part of the keys' gradients."""
        batch, queries, heads, width = q.shape
        rows = rows_at_once(batch, queries, heads, k.shape[1])
        tile = rows * heads * min(queries, QUERY_TILE)
        self._lend("query", tile * width)
        self._lend("keys", rows * k.shape[1] * k.shape[2] * width)
        for name in of_scores:
            self._lend(name, tile * k.shape[1])

    def _scores(self, products, q, k, v, q_pos, k_pos):
        """Count products of all queries with all keys; return (B, H, Tq, Tk)."""
        batch, queries, heads, width = q.shape
        keys, kv_heads = k.shape[1:3]
        assert k.shape == v.shape == (batch, keys, kv_heads, width), (q.shape, k.shape, v.shape)
        assert heads % kv_heads == 0, (heads, kv_heads)
        assert q_pos.shape == (queries,), (q_pos.shape, q.shape)
        assert k_pos.shape == (keys,), (k_pos.shape, k.shape)
        self._count(2 * products * batch * heads * queries * keys * width)
        return batch, heads, queries, keys
