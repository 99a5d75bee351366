"""The array functions for the CPU: formulas in tiles of rows, and what NumPy does differently.

A chain of elementwise operations is limited by its passes over memory. On a tile of rows, arguments
and temporaries stay in cache from one operation to the next. The formulas are those of `array_ops`;
only this file and `numpy_attention` know about tiles. It also has the sums that BLAS makes faster,
the products that are added to an array, and the embeddings. Letters as in `array_ops`.
"""

import math
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from typing import Any

import numpy as np

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.arrays import as_rows
from mpipar.ops.functions import FUNCTIONS
from mpipar.ops.numpy_attention import NumpyAttention
from mpipar.ops.signature import DIGITS, Array, answer

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


def cut(rows: int, width: int) -> Iterator[slice]:
    """Yield slices that divide `rows` rows of `width` elements into tiles."""
    step = max(1, TILE // max(1, width))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def tiled(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that runs a formula of rows tile by tile.

    Arguments that are not rows, such as a gradient that each tile adds to, are passed whole to
    every tile. If the formula takes an array `out` for its first result, that is a tile, too.
    """
    function, takes_out = FUNCTIONS[formula.__name__], "out" in signature(formula).parameters
    names = [part.name for part in function.takes]
    needed = {part.name for part in function.takes if not part.optional}
    # (argument, letters of one of its rows) of those that have rows, and the same of new results
    parts, made_by_row = (
        [(part, (part.dims or ())[1:]) for part in some if part.by_row]
        for some in (function.takes, function.makes)
    )
    counts = [(part.size, part.name) for part in function.takes if part.size]

    @wraps(formula)
    def method(self: ArrayOps, *arguments: Any, **named: Any) -> Any:
        given = dict(zip(names, arguments, strict=False)) | named
        if len(given) != len(arguments) + len(named) or not needed <= given.keys():
            function.bind(arguments, named)  # which says what is wrong
        by_row = [
            (part, x, x.ndim - len(inner))
            for part, inner in parts
            if (x := given.get(part.name)) is not None
        ]
        _, first, at = by_row[0]
        count = math.prod(first.shape[:at])
        tiles = list(cut(count, max(math.prod(x.shape[own:]) for _, x, own in by_row)))
        if len(tiles) <= 1:
            return formula(self, **given)
        rows = {part.name: x.reshape(count, *x.shape[own:]) for part, x, own in by_row}
        for part, x, _ in by_row:
            assert not part.written or np.may_share_memory(rows[part.name], x), (
                f"{function.name}: {part.name} has gaps, so that nothing can be written to its rows"
            )
        sizes = DIGITS | {letter: given[name] for letter, name in counts}
        for part, inner in parts:
            if part.name in rows:
                sizes |= zip(inner, rows[part.name].shape[1:], strict=True)
        results = [
            np.empty(
                (count, *map(sizes.__getitem__, inner)),
                {"": first.dtype, "sum": self.accum_dtype}.get(part.kind, part.kind),
            )
            for part, inner in made_by_row
        ]
        for tile in tiles:
            out = {"out": results[0][tile]} if takes_out else {}
            made = formula(self, **given | {name: x[tile] for name, x in rows.items()} | out)
            made = made if isinstance(made, tuple) else (made,)
            for whole, part_of in list(zip(results, made, strict=False))[takes_out:]:
                whole[tile] = part_of
        if not results:
            return given[function.gives[0].name] if function.gives else None
        return answer([x.reshape(*first.shape[:at], *x.shape[1:]) for x in results])

    return method


class NumpyOps(NumpyAttention):
    """The array functions of `ArrayOps` on NumPy."""

    vars().update(
        {name: tiled(getattr(ArrayOps, name)) for name, line in FUNCTIONS.items() if line.rows}
    )

    # Sums. BLAS adds up rows twice as fast as sum().

    def _row_sums(self, x: Array) -> Array:
        return _in_runs(lambda rows: rows @ np.ones(rows.shape[-1], x.dtype), x)

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

    # Products.

    def matmul(self, x: Array, w: Array) -> Array:
        """Return x w: (..., K) times (K, M) gives (..., M)."""
        rows = as_rows(x)
        y = np.ascontiguousarray((w.T @ rows.T).T) if 1 < len(rows) <= FEW_ROWS else rows @ w
        return y.reshape(*x.shape[:-1], w.shape[1])

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


def _in_runs(sums: Callable[..., Array], *arrays: Array) -> Array:
    """Return sums(*arrays), which adds up along the last dimension, computed over runs of it."""
    length = arrays[0].shape[-1]
    if length <= RUN:
        return sums(*arrays)
    whole = length // RUN * RUN
    runs = (x[..., :whole].reshape(*x.shape[:-1], -1, RUN) for x in arrays)
    return sums(*runs).sum(axis=-1) + sums(*(x[..., whole:] for x in arrays))
