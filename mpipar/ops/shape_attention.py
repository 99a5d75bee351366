"""Attention on shapes only: FLOPs of the full square, the convention of published model FLOPs.

Letters and the two forms are those of `array_attention`.
"""

from mpipar.ops.numpy_attention import GAP, QUERY_TILE, part_sizes


class ShapeAttention:
    """Each function allocates what the one of `NumpyAttention` or the fused kernels allocates."""

    def attention_forward(self, q, k, v, q_pos, k_pos):
        """Return (y (B, Tq, H, d), probs (B, H, Tq, Tk) or, in tiles, (y, lse)); two products."""
        scores = self._scores(2, q, k, v, q_pos, k_pos)
        self._lend_tiles(q, k, "queries", turned=("keys",), of_keys=("values",))
        y = self.empty(q.shape, q.dtype)
        if q.shape[-1] <= self.tiled_head_width:
            return y, (y, self.empty(scores[:-1], self.statistics))
        return y, self.empty(scores, q.dtype)

    def attention_backward_input(self, dy, q, k, v, saved, q_pos, k_pos, *, out=None):
        """Return (dq, dk, dv), or `out`; four products."""
        scores = self._scores(4, q, k, v, q_pos, k_pos)
        self._lend_backward(q, k, "scores")
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
        self._lend_tiles(q, k, "queries", turned=("keys",), of_keys=("values",),
                         of_scores=("scores",))
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
        self._lend_backward(q, k, "scores", "probs")
        self._lend_tiles(q, k, turned=("turned keys",))
        assert dy.shape == q.shape, (dy.shape, q.shape)
        assert lse.shape == delta.shape == scores[:-1], (lse.shape, delta.shape, scores)
        return tuple(self.empty(x.shape, self.statistics) for x in (q, k, v))

    def _lend_backward(self, q, k, *of_scores):
        """Count the buffers of a backward over the tiles."""
        sums = ("dk", "dv", "part") if q.shape[1] > QUERY_TILE or q.shape[2] > k.shape[2] else (
            "dk", "dv")  # one product makes each
        self._lend_tiles(q, k, "queries", "dy", turned=("values",), of_scores=of_scores,
                         of_keys=("keys", *sums), of_tile=("dq",))

    def _lend_tiles(self, q, k, *of_queries, turned=(), of_keys=(), of_scores=(), of_tile=()):
        """Count the buffers for a part, by name: see `NumpyAttention`."""
        (batch, queries, heads, width), (_, keys, kv_heads, _) = q.shape, k.shape
        rows, own_heads = part_sizes(batch, queries, heads, keys, kv_heads)
        heads, kv_heads = heads // kv_heads * own_heads, own_heads
        tile = min(queries, QUERY_TILE)
        for names, size in (
            (of_queries, heads * queries * width), (of_tile, heads * tile * width),
            (of_keys, kv_heads * keys * width), (turned, kv_heads * width * (keys + GAP)),
            (of_scores, heads * tile * keys),
        ):
            for name in names:
                self._lend(name, rows * size)

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
