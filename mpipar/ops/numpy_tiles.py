"""The driver of the CPU: functions of rows walk over tiles of rows that stay in cache.

A chain of elementwise operations pays for its passes over memory. On a tile of rows, arguments and
temporaries stay in cache from one operation to the next. The formulas are those of `array_ops`;
only this file knows of tiles.
"""

from functools import partial, wraps
from inspect import signature
from math import prod

import numpy as np

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.functions import FUNCTIONS, ROWS, shape_of

# Elements of a tile: 170 rows of 384. Three float32 tiles fit a 1 MiB L2 cache. 2^14 is 20 % slower
# (interpreter time). No tiles at all cost the same only if the L3 cache holds the whole array.
TILE = 1 << 16


def cut(rows, width):
    """Yield slices that cut `rows` rows of `width` elements into tiles."""
    step = max(1, TILE // max(1, width))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def walk(formula, function, given, takes_out):
    """Return what formula(**given) returns, made tile by tile; `function`: its line of the table.

    Arguments that are not rows, such as a gradient that each tile adds to, go to every tile whole.
    takes_out: the formula writes its first result where it is told.
    """
    by_row = [(part, x, x.ndim - len(part.dims) + 1)
              for part, x in function.arrays(given) if part.by_row]
    _, first, at = by_row[0]
    count = prod(first.shape[:at])
    tiles = list(cut(count, max(prod(x.shape[own:]) for _, x, own in by_row)))
    if len(tiles) <= 1:
        return formula(**given)
    rows = {part.name: x.reshape(count, *x.shape[own:]) for part, x, own in by_row}
    for part, x, _ in by_row:
        assert not part.written or np.may_share_memory(rows[part.name], x), (
            f"{function.name}: {part.name} has gaps, so that nothing can be written to its rows")
    results = []
    if takes_out:
        inside = shape_of(function.gives[0].dims[1:], function.sizes(given))
        results = [np.empty((count, *inside), first.dtype)]
    for tile in tiles:
        out = {"out": results[0][tile]} if takes_out else {}
        made = formula(**given | {name: x[tile] for name, x in rows.items()} | out)
        if function.makes:
            made = made if isinstance(made, tuple) else (made,)
            results += [np.empty((count, *x.shape[1:]), x.dtype) for x in made[len(results):]]
            for whole, part in list(zip(results, made, strict=True))[takes_out:]:
                whole[tile] = part
    results = [x.reshape(*first.shape[:at], *x.shape[1:]) for x in results] or [
        given[part.name] for part in function.gives]
    return tuple(results) if len(results) > 1 else results[0] if results else None


def _walked(name):
    """Return the method that walks a function of rows."""
    plain, function = getattr(ArrayOps, name), FUNCTIONS[name]
    takes_out = "out" in signature(plain).parameters

    @wraps(plain)
    def method(self, *arguments, **named):
        given = function.bind(arguments, named)
        return walk(partial(plain, self), function, given, takes_out)

    return method


class TiledOps(ArrayOps):
    """The array functions of `ArrayOps` on NumPy, all functions of rows in tiles."""


for _name in ROWS:
    setattr(TiledOps, _name, _walked(_name))
