"""The array functions for the CPU: formulas in tiles of rows, and what NumPy does differently.

A chain of elementwise operations is limited by its passes over memory. On a tile of rows, arguments
and temporaries stay in cache from one operation to the next. The formulas are those of `array_ops`;
only this file knows about tiles. It also has the sums that BLAS makes faster, the products that are
added to an array, the embeddings, and attention. Buffers belong to the object, and a constant
bounds their size. Letters as in `array_ops`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from inspect import signature
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from mpipar.ops.array_ops import ArrayOps, as_rows, filled
from mpipar.ops.functions import FUNCTIONS
from mpipar.ops.signature import Array, Function, Method, Shape, ThreeArrays, shape_of

# Elements of a tile: 170 rows of 384. Three float32 tiles fit into a 1 MiB L2 cache. 2^14 is 20 %
# slower (interpreter overhead). Without tiles the cost is the same only if the L3 cache holds the
# whole array.
TILE = 1 << 16
# Elements of the scratch buffer through which a product is added to a weight gradient.
PRODUCT_TILE = 1 << 20
SHORT_SUM = 256  # numbers whose sum loses nothing relevant: sums of sums are float64
# Numbers of a row, and rows, that BLAS may add up at once: errors grow with their number. It adds
# up several lanes of a row side by side, but most rows one after another.
RUN, ROW_RUN = 1024, 64
# Up to this many rows, a product with a matrix is faster as (w^T x^T)^T: BLAS packs its right
# operand again in every product, and here that is the few rows, not the weight.
FEW_ROWS = 16
# Queries of a tile. At T = 1024, 64 and 256 are equal within 5 %. Without tiles the hidden triangle
# is computed as well, which takes 1.5 times as long forward, and 1.7 times backward (bench.tiles).
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


class Part(NamedTuple):
    """A part's place in arrays like q (B, T, H, d), k (B, T, Hkv, d) and stats (B, H, ...)."""

    of_q: tuple[slice, ...]
    of_k: tuple[slice, ...]
    of_rows: tuple[slice, ...]


ProbsOfTile: TypeAlias = Callable[[Tile, Array], Array]
ProbsOf: TypeAlias = Callable[[Part, Array, Array, Array], ProbsOfTile]


def cut(rows: int, width: int) -> Iterator[slice]:
    """Yield slices that divide `rows` rows of `width` elements into tiles."""
    step = max(1, TILE // max(1, width))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def walk(
    formula: Callable[..., Any], function: Function, given: dict[str, Any], takes_out: bool
) -> Any:
    """Return what formula(**given) returns, computed tile by tile; `function`: its line.

    Arguments that are not rows, such as a gradient that each tile adds to, are passed whole to
    every tile. takes_out: whether the formula takes an array for its first result.
    """
    by_row = [
        (part, x, x.ndim - len(part.dims or ()) + 1)
        for part, x in function.arrays(given)
        if part.by_row
    ]
    _, first, at = by_row[0]
    count = math.prod(first.shape[:at])
    tiles = list(cut(count, max(math.prod(x.shape[own:]) for _, x, own in by_row)))
    if len(tiles) <= 1:
        return formula(**given)
    rows = {part.name: x.reshape(count, *x.shape[own:]) for part, x, own in by_row}
    for part, x, _ in by_row:
        assert not part.written or np.may_share_memory(rows[part.name], x), (
            f"{function.name}: {part.name} has gaps, so that nothing can be written to its rows"
        )
    results = []
    if takes_out:
        inside = shape_of((function.gives[0].dims or ())[1:], function.sizes(given))
        results = [np.empty((count, *inside), first.dtype)]
    for tile in tiles:
        out = {"out": results[0][tile]} if takes_out else {}
        made = formula(**given | {name: x[tile] for name, x in rows.items()} | out)
        if function.makes:
            made = made if isinstance(made, tuple) else (made,)
            results += [np.empty((count, *x.shape[1:]), x.dtype) for x in made[len(results) :]]
            for whole, part in list(zip(results, made, strict=True))[takes_out:]:
                whole[tile] = part
    results = [x.reshape(*first.shape[:at], *x.shape[1:]) for x in results] or [
        given[part.name] for part in function.gives
    ]
    return tuple(results) if len(results) > 1 else results[0] if results else None


def in_tiles(formula: Method) -> Method:
    """Return the method that runs a formula tile by tile.

    It must be a formula of rows: any rows of the results need only the same rows of the arguments.
    """
    function, takes_out = FUNCTIONS[formula.__name__], "out" in signature(formula).parameters

    @wraps(formula)
    def method(self: ArrayOps, *arguments: Any, **named: Any) -> Any:
        given = function.bind(arguments, named)
        return walk(partial(formula, self), function, given, takes_out)

    return cast(Method, method)


class NumpyOps(ArrayOps):
    """The array functions of `ArrayOps` on NumPy."""

    takes_16_bits = ("add_parts",)

    def __init__(self, dtype: Any) -> None:
        super().__init__(np, dtype, "cpu")
        self._buffers: dict[str, np.ndarray] = {}

    def _buffer(self, name: str, shape: Shape) -> np.ndarray:
        """Return an uninitialised array that the next call with this name overwrites."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.empty(size, self.dtype)
        buffer: np.ndarray = self._buffers[name][:size].reshape(shape)
        return buffer

    # The formulas of rows.

    gelu_forward = in_tiles(ArrayOps.gelu_forward)
    gelu_backward_input = in_tiles(ArrayOps.gelu_backward_input)
    swiglu_forward = in_tiles(ArrayOps.swiglu_forward)
    swiglu_backward_input = in_tiles(ArrayOps.swiglu_backward_input)
    rmsnorm_forward = in_tiles(ArrayOps.rmsnorm_forward)
    rmsnorm_backward_input = in_tiles(ArrayOps.rmsnorm_backward_input)
    rmsnorm_backward_weight = in_tiles(ArrayOps.rmsnorm_backward_weight)
    layernorm_forward = in_tiles(ArrayOps.layernorm_forward)
    layernorm_backward_input = in_tiles(ArrayOps.layernorm_backward_input)
    layernorm_backward_weight = in_tiles(ArrayOps.layernorm_backward_weight)
    cross_entropy_forward = in_tiles(ArrayOps.cross_entropy_forward)
    cross_entropy_backward_input = in_tiles(ArrayOps.cross_entropy_backward_input)
    top_forward = in_tiles(ArrayOps.top_forward)
    sgd_step = in_tiles(ArrayOps.sgd_step)
    adamw_step = in_tiles(ArrayOps.adamw_step)

    # Sums. BLAS adds up rows twice as fast as sum().

    def _row_sums(self, x: Array) -> Array:
        return _in_runs(_row_sums, x)

    def _row_dots(self, x: Array, y: Array) -> Array:
        return _in_runs(np.vecdot, x, y)

    def _column_sums(self, x: Array, factors: Array | None = None) -> Array:
        rows = as_rows(x)
        factors = np.ones(len(rows), x.dtype) if factors is None else factors.reshape(-1)
        if len(rows) <= ROW_RUN:
            return factors @ rows
        whole = len(rows) // ROW_RUN * ROW_RUN
        runs = factors[:whole].reshape(-1, 1, ROW_RUN) @ rows[:whole].reshape(
            -1, ROW_RUN, rows.shape[1]
        )
        return self._column_sums(runs) + factors[whole:] @ rows[whole:]

    def square_sum(self, x: Array) -> Any:
        """Return the sum of squares of x as a host float, accumulated in float64.

        BLAS sums SHORT_SUM squares at a time in the type of x, unless one is too large for it.
        """
        flat = x.reshape(-1)
        rest = flat.size % SHORT_SUM
        rows = flat[rest:].reshape(-1, SHORT_SUM)
        with np.errstate(over="ignore"):
            total = sum(
                float(np.vecdot(part, part).sum(dtype=np.float64))
                for part in (rows, flat[None, :rest])
            )
        return total if math.isfinite(total) else super().square_sum(x)

    def add_parts(self, parts: Array, total: Array | None = None) -> Array:
        """Return the sum of parts (P, ...); 16-bit ones are added in float32, and rounded once."""
        if parts.itemsize > 2:
            return super().add_parts(parts, total)
        total = np.empty(parts.shape[1:], parts.dtype) if total is None else total
        rows, sums = parts.reshape(len(parts), -1), total.reshape(-1)
        for tile in cut(sums.size, 2):
            wide, one = self._buffer("sum", (2, *sums[tile].shape))
            wide[:] = 0  # where sum() begins, too: two zeros of sign - give one of sign +
            for row in rows:
                one[:] = row[tile]
                wide += one
            sums[tile] = wide
        return total

    # Products.

    def matmul(self, x: Array, w: Array) -> Array:
        """Return x w: (..., K) times (K, M) gives (..., M)."""
        rows = as_rows(x)
        return _product(rows, w).reshape(*x.shape[:-1], w.shape[1])

    def _multiply(self, x: Array, w: Array, out: Array) -> None:
        if 1 < len(x) <= FEW_ROWS:
            super()._multiply(x, w, out)
        else:
            np.matmul(x, w, out=out)

    def matmul_tn_add(self, x: Array, y: Array, out: Array) -> None:
        """Add x^T y to out: (..., K) and (..., M) give (K, M); out may be a transposed view.

        NumPy cannot make BLAS add to its output, so the product goes through a scratch buffer, in
        blocks of rows of out. The pass that adds it reads it from cache (0.05 ms after a product of
        9 ms).
        """
        assert out.shape == (x.shape[-1], y.shape[-1]), (out.shape, x.shape, y.shape)
        left, right = as_rows(x), as_rows(y)
        if out.strides[0] < out.strides[1]:  # the gradient of a tied table: (x^T y)^T = y^T x
            left, right, out = right, left, out.T
        step = max(64, PRODUCT_TILE // max(1, out.shape[1]))
        for first in range(0, out.shape[0], step):
            block = out[first : first + step]
            product = self._buffer("product", block.shape)
            np.matmul(left[:, first : first + step].T, right, out=product)
            block += product

    # Rotary positions, in tiles of tokens.

    def _rotate(self, x: Array, cos: Array, sin: Array) -> None:
        whole = *x.shape[:2], cos.shape[-1]
        cos, sin = np.broadcast_to(cos, whole), np.broadcast_to(sin, whole)
        for row in range(len(x)):
            for tile in cut(x.shape[1], x.shape[2] * x.shape[3]):
                super()._rotate(x[row, tile], cos[row, tile], sin[row, tile])

    # Embeddings.

    def embedding_backward_weight(self, ids: Array, dy: Array, dtable: Array, start: int) -> None:
        """Add each row of dy (..., D) to its id's row of dtable, if this shard holds it."""
        local = (ids - start).reshape(-1).tolist()
        for row, dy_row in zip(local, as_rows(dy), strict=True):  # 5 times faster than np.add.at
            if 0 <= row < len(dtable):
                dtable[row] += dy_row

    # Causal attention in tiles of queries. A tile of queries leaves out the keys that none of its
    # queries may see, which in training is about half of all products and exponentials. Some heads
    # are copied first, each to a matrix of its own, transposed where a product needs it, because
    # BLAS multiplies these small matrices at up to twice the rate of strided views. For a single
    # query, as in generation, copies do not pay off. Both directions must multiply queries and keys
    # in the same way, since large scores would otherwise differ in their last bits. Letters and the
    # two forms are those of `array_ops`. Here the block form has the scores of one tile at a time.
    # G = H / Hkv query heads share a key head.
    #
    # Arrays are divided into parts first: some heads of one row or, where rows are short, all heads
    # of R rows. In a method that gets a part, H and Hkv are the heads of that part.

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
        if probs is None and len(q_pos) == 1 and k_pos.max() <= q_pos[0]:
            return self._attend_with_one(q, k, v)
        y = np.empty(q.shape, q.dtype)
        stats = np.empty((len(q), q.shape[2], q.shape[1], 2), q.dtype)
        tiles = _query_tiles(q_pos, k_pos, q.dtype)
        for part in _parts(q, k):
            self._attend_part(
                q[part.of_q],
                k[part.of_k],
                v[part.of_k],
                tiles,
                y[part.of_q],
                stats[part.of_rows],
                None if probs is None else probs[part.of_rows],
            )
        return y, stats

    def _attend_part(
        self,
        q: Array,
        k: Array,
        v: Array,
        tiles: list[Tile],
        y: Array,
        stats: Array,
        probs: Array | None,
    ) -> None:
        """Write y, stats and, if there is an array for them, the probabilities of a part."""
        kv_heads, out = k.shape[2], _by_group(y, k.shape[2])
        queries, keys = self._scaled(q, kv_heads), self._turned("keys", k, q.shape[1])
        values = self._heads("values", v, kv_heads)
        for tile in tiles:
            # `rows`: the array of scores (R H, .., Tk) whose rows `at` are the tile's. The
            # probabilities of a part are contiguous, so theirs is a view.
            if probs is None:
                at = slice(0, tile.queries.stop - tile.queries.start)
                rows = self._buffer("scores", (len(q) * q.shape[2], at.stop, tile.keys))
            else:
                rows, at = probs.reshape(-1, *probs.shape[2:]), tile.queries
                rows[:, at, tile.keys :] = 0
            scores = rows[:, at, : tile.keys]
            _write_scores(queries, keys, tile, scores)
            top, total = self._softmax_tile(rows, at, tile.keys)
            for which, one in enumerate((top, total)):
                stats[..., tile.queries, which] = one.reshape(*stats.shape[:2], -1)
            np.matmul(
                _split(scores, queries), values[..., : tile.keys, :], out=out[..., tile.queries, :]
            )

    def _attend_with_one(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Return (y, stats) of one query per row, which sees all keys: all rows at once."""
        batch, _, heads, _ = q.shape
        queries, keys = self._scaled(q, k.shape[2]), self._turned("keys", k, 1)
        scores = self._buffer("scores", (*queries.shape[:4], k.shape[1]))
        np.matmul(queries, keys, out=scores)
        rows, stats = scores.reshape(1, batch * heads, -1), np.empty((batch * heads, 2), q.dtype)
        stats[:, 0], stats[:, 1] = self._softmax_tile(rows, slice(0, batch * heads), k.shape[1])
        y = scores @ _by_group(v, k.shape[2])
        return y.reshape(q.shape), stats.reshape(batch, heads, 1, 2)

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

    def _turned(self, name: str, x: Array, queries: int) -> Array:
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
        top = p.max(axis=-1, initial=self.lowest)
        p -= top[..., None]
        np.exp(p, out=p)
        with np.errstate(all="ignore"):  # BLAS may raise flags for numbers beside these
            total = self._row_sums(p)
        p *= np.reciprocal(filled(total))[..., None]
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

        def probs_of(part: Part, queries: Array, keys: Array, dys: Array) -> ProbsOfTile:
            rows = saved[part.of_rows].reshape(-1, *saved.shape[2:])

            def of_tile(tile: Tile, dprobs: Array) -> Array:
                self._softmax_backward_tile(rows, tile.queries, dprobs)
                return rows[:, tile.queries, : tile.keys]

            return of_tile

        return self._walk_back(dy, q, k, v, _query_tiles(q_pos, k_pos, q.dtype), probs_of, out)

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
        top, share = stats[..., 0], np.reciprocal(filled(stats[..., 1]))
        delta = delta * share

        def probs_of(part: Part, queries: Array, keys: Array, dys: Array) -> ProbsOfTile:
            keys = self._turned("turned keys", keys, queries.shape[3])
            dys *= share[part.of_rows].reshape(*dys.shape[:-1], 1)

            def of_tile(tile: Tile, dprobs: Array) -> Array:
                probs, of_row = self._buffer("probs", dprobs.shape), (*dprobs.shape[:2], 1)
                _write_scores(queries, keys, tile, probs)
                probs -= top[part.of_rows][..., tile.queries].reshape(of_row)
                np.exp(probs, out=probs)
                dprobs -= delta[part.of_rows][..., tile.queries].reshape(of_row)
                dprobs *= probs
                return probs

            return of_tile

        return self._walk_back(dy, q, k, v, _query_tiles(q_pos, k_pos, q.dtype), probs_of)

    def _softmax_backward_tile(self, probs: Array, at: slice, dprobs: Array) -> None:
        """Write dscores over dprobs (R H, n, keys): by row, probs (dprobs - sum(probs dprobs))."""
        p = probs[:, at, : dprobs.shape[-1]]
        dprobs -= np.vecdot(dprobs, p)[..., None]
        dprobs *= p

    def _walk_back(
        self,
        dy: Array,
        q: Array,
        k: Array,
        v: Array,
        tiles: list[Tile],
        probs_of: ProbsOf,
        out: Sequence[Array] | None = None,
    ) -> ThreeArrays:
        """Return (dq, dk, dv).

        probs_of(Part, its queries as `_scaled` returns them, its k, a copy of its dy) returns a
        function of (tile, dprobs), which writes dscores over dprobs (R H, n, keys) and returns the
        probabilities of the tile. It may move one of their factors to its copy of dy.
        """
        dq, dk, dv = out or tuple(np.empty(x.shape, x.dtype) for x in (q, k, v))
        for part in _parts(q, k):
            kv_heads = k[part.of_k].shape[2]
            queries = self._scaled(q[part.of_q], kv_heads)
            dys = self._heads("dy", dy[part.of_q], kv_heads)
            self._walk_part(
                dys,
                queries,
                k[part.of_k],
                v[part.of_k],
                tiles,
                probs_of(part, queries, k[part.of_k], dys),
                (dq[part.of_q], dk[part.of_k], dv[part.of_k]),
            )
        return dq, dk, dv

    def _walk_part(
        self,
        dys: Array,
        queries: Array,
        k: Array,
        v: Array,
        tiles: list[Tile],
        probs_of_tile: ProbsOfTile,
        out: Sequence[Array],
    ) -> None:
        """Write (dq, dk, dv) of a part to the arrays `out`."""
        dq, kv_heads, factor = out[0], k.shape[2], k.dtype.type(k.shape[-1] ** -0.5)
        keys, values = self._heads("keys", k, kv_heads), self._turned("values", v, dq.shape[1])
        sums = [self._buffer(name, keys[:, :, 0].shape) for name in ("dk", "dv")]
        # The last tile comes first: in training it reaches every key, so its products fill both.
        for tile in reversed(tiles):
            at, fresh = tile.queries, tile is tiles[-1]
            dscores = self._buffer(
                "scores", (math.prod(queries.shape[:3]), at.stop - at.start, tile.keys)
            )
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


def _row_sums(x: Array) -> Array:
    return x @ np.ones(x.shape[-1], x.dtype)


def _in_runs(sums: Callable[..., Array], *arrays: Array) -> Array:
    """Return sums(*arrays), which adds up along the last dimension, computed over runs of it."""
    length = arrays[0].shape[-1]
    if length <= RUN:
        return sums(*arrays)
    whole = length // RUN * RUN
    runs = (x[..., :whole].reshape(*x.shape[:-1], -1, RUN) for x in arrays)
    return sums(*runs).sum(axis=-1) + sums(*(x[..., whole:] for x in arrays))


def _product(x: Array, w: Array) -> Array:
    """Return x (rows, K) times w (K, M), C-contiguous."""
    if 1 < len(x) <= FEW_ROWS:
        return np.ascontiguousarray((w.T @ x.T).T)
    return x @ w


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


def _parts(q: Array, k: Array) -> list[Part]:
    """Return the Parts of q (B, Tq, H, d) and k (B, Tk, Hkv, d)."""
    (batch, queries, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
    assert heads % kv_heads == 0, (heads, kv_heads)
    some_rows, some_heads = part_sizes(batch, queries, heads, keys, kv_heads)
    parts, group, tokens = [], heads // kv_heads, slice(None)
    for row in range(0, batch, some_rows):
        for head in range(0, kv_heads, some_heads):
            rows, of_keys = slice(row, row + some_rows), slice(head, head + some_heads)
            of_queries = slice(group * head, group * (head + some_heads))
            parts.append(
                Part((rows, tokens, of_queries), (rows, tokens, of_keys), (rows, of_queries))
            )
    return parts


def _by_group(x: Array, kv_heads: int) -> Array:
    """Return the view (R, Hkv, G, T, d) of x (R, T, H, d). If H is Hkv, G is 1."""
    rows, tokens, heads, width = x.shape
    return x.reshape(rows, tokens, kv_heads, heads // kv_heads, width).transpose(0, 2, 3, 1, 4)


def _split(scores: Array, queries: Array) -> Array:
    """Return the view (R, Hkv, G, n, keys) of scores (R H, n, keys) of queries (R, Hkv, G, ...)."""
    return scores.reshape(*queries.shape[:3], *scores.shape[1:])


def _query_tiles(q_pos: Array, k_pos: Array, dtype: Any) -> list[Tile]:
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
