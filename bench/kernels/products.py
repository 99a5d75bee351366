"""One product on one core in four ways: plain loops, loops over tiles, packed tiles, and BLAS.

Numba compiles the loops. Each rung reuses what it has read more often than the previous one. Its
`flop_per_byte` is operations per byte that it asks for beyond its tiles: what is in a tile counts
as read once, everything else counts each time. BLAS counts every matrix once, which is the best
possible. A rung is bounded by the rate of memory times flop_per_byte, and by the peak of the core:
the roofline.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import numba
import numpy as np

TILE = 64  # rows, inner places and columns of a tile
INNER, COLUMNS = 256, 256  # of a packed tile of b: 256 KiB, for the second-level cache
TOLERANCE = 2e-5  # of the largest entry, float32
FLOAT = 4  # bytes


@numba.njit(fastmath=True)
def naive(a, b, c):
    """Compute c = a b, an entry at a time: a row of `a` times a column of `b`, which is strided."""
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = np.float32(0)
            for k in range(a.shape[1]):
                total += a[i, k] * b[k, j]
            c[i, j] = total


@numba.njit(fastmath=True)
def tiled(a, b, c):
    """Compute c = a b, a tile of c at a time; tiles of a and b stay in the cache while used."""
    m, n, inner = a.shape[0], b.shape[1], a.shape[1]
    c[:] = 0
    for i0 in range(0, m, TILE):
        for j0 in range(0, n, TILE):
            for k0 in range(0, inner, TILE):
                for i in range(i0, min(i0 + TILE, m)):
                    row = c[i, j0 : j0 + TILE]
                    for k in range(k0, min(k0 + TILE, inner)):
                        add_row(row, a[i, k], b[k, j0 : j0 + TILE])


@numba.njit(fastmath=True, inline="always")
def add_row(row, factor, other):
    """Compute row += factor * other, several elements in one instruction."""
    for j in range(len(row)):
        row[j] += factor * other[j]


@numba.njit(fastmath=True)
def packed(a, b, c):
    """Compute c = a b with packed tiles of b, and four rows by four inner places at a time.

    An entry of c is read and written once for four products, and one of b is read for four rows.
    Rows and inner places must be multiples of four.
    """
    m, n, inner = a.shape[0], b.shape[1], a.shape[1]
    panel = np.empty((INNER, COLUMNS), np.float32)
    c[:] = 0
    for k0 in range(0, inner, INNER):
        depth = min(INNER, inner - k0)
        for j0 in range(0, n, COLUMNS):
            width = min(COLUMNS, n - j0)
            panel[:depth, :width] = b[k0 : k0 + depth, j0 : j0 + width]
            columns = slice(j0, j0 + width)
            for i in range(0, m, 4):
                rows = c[i, columns], c[i + 1, columns], c[i + 2, columns], c[i + 3, columns]
                for k in range(0, depth, 4):
                    four_by_four(rows, a, i, k0 + k, panel, k)


@numba.njit(fastmath=True, inline="always")
def four_by_four(rows, a, i, place, panel, k):
    """Add four products to each of four rows; place, k: the first of them in `a` and in the tile.

    The sixteen numbers of `a` stay in registers.
    """
    c0, c1, c2, c3 = rows
    b0, b1, b2, b3 = panel[k], panel[k + 1], panel[k + 2], panel[k + 3]
    a00, a01, a02, a03 = a[i, place], a[i, place + 1], a[i, place + 2], a[i, place + 3]
    a10, a11, a12, a13 = (
        a[i + 1, place],
        a[i + 1, place + 1],
        a[i + 1, place + 2],
        a[i + 1, place + 3],
    )
    a20, a21, a22, a23 = (
        a[i + 2, place],
        a[i + 2, place + 1],
        a[i + 2, place + 2],
        a[i + 2, place + 3],
    )
    a30, a31, a32, a33 = (
        a[i + 3, place],
        a[i + 3, place + 1],
        a[i + 3, place + 2],
        a[i + 3, place + 3],
    )
    for j in range(len(c0)):
        x0, x1, x2, x3 = b0[j], b1[j], b2[j], b3[j]
        c0[j] += a00 * x0 + a01 * x1 + a02 * x2 + a03 * x3
        c1[j] += a10 * x0 + a11 * x1 + a12 * x2 + a13 * x3
        c2[j] += a20 * x0 + a21 * x1 + a22 * x2 + a23 * x3
        c3[j] += a30 * x0 + a31 * x1 + a32 * x2 + a33 * x3


class Rung(NamedTuple):
    """A product, and the numbers of floats of a, b and c that it moves for sides of `size`."""

    call: Callable
    floats: Callable


RUNGS = {
    "naive": Rung(naive, lambda size: (size**3, size**3, size**2)),
    "tiled": Rung(
        tiled, lambda size: (size**2 * ceil(size / TILE), size**2 * ceil(size / TILE), 2 * size**2)
    ),
    "packed": Rung(
        packed,
        lambda size: (size**2 * ceil(size / COLUMNS), size**2, 2 * size**2 * ceil(size / INNER)),
    ),
    "BLAS": Rung(lambda a, b, c: np.matmul(a, b, out=c), lambda size: (size**2, size**2, size**2)),
}


def flop_per_byte(rung: Rung, size: int) -> float:
    """Return 2 size^3 operations over the bytes that the rung moves."""
    return 2 * size**3 / (FLOAT * sum(rung.floats(size)))


def rows(size: int, seconds_of: Callable) -> list[dict]:
    """Return a row for each rung. seconds_of(function): its time.

    Raises ValueError if a result is wrong.
    """
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), np.float32) for _ in range(2))
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    found = []
    for name, rung in RUNGS.items():
        c = np.full_like(a, np.nan)
        rung.call(a, b, c)
        error = np.abs(c - wanted).max() / np.abs(wanted).max()
        if not error <= TOLERANCE:
            raise ValueError(f"{name} product: off by {error:.1e} of the largest entry")
        seconds = seconds_of(lambda rung=rung, c=c: rung.call(a, b, c))
        found.append(
            {
                "product": name,
                "size": size,
                "ms": seconds * 1e3,
                "gflops": 2e-9 * size**3 / seconds,
                "flop_per_byte": flop_per_byte(rung, size),
            }
        )
    blas = found[-1]["gflops"]
    return [row | {"percent_of_blas": 100 * (row["gflops"] / blas)} for row in found]
