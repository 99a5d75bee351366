"""Causal attention in tiles, as functions of device arrays: the scores are never in memory.

Plain multiply-adds take float32 arrays, tensor cores take bfloat16 and float16. Sums, statistics
and `lse` are float32. Letters as in `array_attention`. d is at most MOST_WIDTH, and Hkv may be any
divisor of H.
"""

from collections import namedtuple
from math import ceil, e, log, log2

import numpy as np

from mpipar.ops.cuda.ladder import C_TYPES

# Bytes of an element: kernel: width of a tile: its rows, its columns, and how many blocks a
# processor has enough registers for. A narrower head is filled up with zeros. No block needs more
# than 99 KiB of shared memory, which compute capabilities 8.6 and 8.9 have.
TILES = {
    4: {"flash_forward": {32: (64, 32, 3), 64: (64, 32, 3), 128: (64, 32, 2)},
        "flash_dq": {32: (64, 32, 2), 64: (64, 32, 2), 128: (48, 16, 2)},
        "flash_dkv": {32: (64, 32, 2), 64: (64, 32, 2), 128: (48, 16, 2)}},
    2: {"flash_forward": {32: (128, 64, 2), 64: (128, 32, 2), 128: (128, 64, 1)},
        "flash_dq": {32: (64, 32, 2), 64: (64, 32, 2), 128: (64, 32, 2)},
        "flash_dkv": {32: (64, 32, 2), 64: (64, 32, 2), 128: (64, 16, 2)}},
}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
WIDTHS = (32, 64, 128)
MOST_WIDTH = WIDTHS[-1]
DELTA_THREADS = 128
LOG2_E, LN_2 = log2(e), log(2)
FILES = {"flash_forward": "flash_forward.cu", "flash_dq": "flash_backward.cu",
         "flash_dkv": "flash_backward.cu"}

# rows: of a block.
Tile = namedtuple("Tile", "file name rows shared_bytes")


def tile(kernel, dtype, width):
    """Return the Tile of a kernel of TILES for heads of `width`, by NumPy's name of the type."""
    itemsize = ITEM_BYTES[dtype]
    width = next(one for one in WIDTHS if width <= one)
    rows, columns, blocks = TILES[itemsize][kernel][width]
    name = f"{kernel}<{C_TYPES[dtype]}, {width}, {rows}, {columns}, {blocks}>"
    in_shared = rows + 2 * columns if kernel == "flash_forward" else 2 * rows + 4 * columns
    scratch = rows * (columns + 4) if itemsize == 4 else 0
    shared_bytes = in_shared * (width * itemsize + 16) + scratch * itemsize
    return Tile(FILES[kernel], name, rows, shared_bytes)


def delta_name(y_dtype, dtype):
    """Return the name expression of flash_delta for y and dy of these types."""
    return f"flash_delta<{C_TYPES[y_dtype]}, {C_TYPES[dtype]}, {DELTA_THREADS}>"


def used():
    """Return file -> name expressions of what `Attention` runs."""
    pairs = {(y_dtype, dtype) for dtype in ITEM_BYTES for y_dtype in ("float32", dtype)}
    files = {"flash_backward.cu": tuple(delta_name(*pair) for pair in sorted(pairs))}
    for kernel, file in FILES.items():
        files[file] = files.get(file, ()) + tuple(
            tile(kernel, dtype, width).name for dtype in ITEM_BYTES for width in WIDTHS)
    return files


class Attention:
    """The kernels through one loader; results are new arrays of `xp` unless the text says
    otherwise.
    """

    def __init__(self, xp, loader):
        self._xp, self._loader = xp, loader

    def forward(self, q, k, v, q_pos, k_pos, wide=False):
        """Return (y (B, Tq, H, d), lse (B, H, Tq)) of q (B, Tq, H, d), k and v (B, Tk, Hkv, d).

        Views of a packed (B, T, 3, H, d) array are taken as they are. So are the first keys of a
        longer array. wide: y is float32, whatever the type of q.
        """
        y, lse = self._xp.empty(q.shape, np.float32 if wide else q.dtype), self._row_values(q)
        sizes, arrays = self._arguments(q, k, v)
        self._walk("flash_forward", q, q, *sizes, *arrays, self._ids(q_pos), self._ids(k_pos),
                   q.shape[-1] ** -0.5, int(wide), y, lse)
        return y, lse

    def delta(self, dy, y):
        """Return delta (B, H, Tq), the sum of dy y over a head; y of dy's type or float32."""
        batch, queries, heads, width = y.shape
        delta, rows = self._row_values(y), batch * queries * heads
        y, dy = self._xp.ascontiguousarray(y), self._xp.ascontiguousarray(dy)
        self._loader.launch("flash_backward.cu", delta_name(y.dtype.name, dy.dtype.name),
                            (ceil(rows / (DELTA_THREADS // 32)),), (DELTA_THREADS,),
                            (rows, queries, heads, width, y, dy, delta))
        return delta

    def backward(self, dy, q, k, v, lse, delta, *, q_pos, k_pos, out=None):
        """Return (dq, dk, dv) of what `forward` and `delta` returned, in float32.

        out: where to write them instead, three arrays of q's type or of float32. They may be views
        of a packed array.
        """
        out = out or tuple(self._xp.empty(x.shape, np.float32) for x in (q, k, v))
        wide = int(out[0].dtype == np.float32)
        (dq,), dq_stride, _ = self._alike(True, out[0])
        (dk, dv), dkv_stride, _ = self._alike(True, *out[1:])
        sizes, arrays = self._arguments(q, k, v)
        given = (*arrays, self._xp.ascontiguousarray(dy), self._ids(q_pos), self._ids(k_pos),
                 q.shape[-1] ** -0.5, lse, delta, wide)
        self._walk("flash_dq", q, q, *sizes, dq_stride, *given, dq)
        self._walk("flash_dkv", q, k, *sizes, dkv_stride, *given, dk, dv)
        for asked, made in zip(out, (dq, dk, dv), strict=True):
            if made is not asked:
                asked[...] = made
        return out

    def _row_values(self, q):
        """Return an uninitialised float32 for each row of each head, (B, H, Tq)."""
        batch, queries, heads, _ = q.shape
        return self._xp.empty((batch, heads, queries), np.float32)

    def _walk(self, kernel, q, rows, *arguments):
        """Start a kernel with a block for each tile of each head of `rows` (B, T, heads, d)."""
        batch, tokens, heads, width = rows.shape
        chosen = tile(kernel, q.dtype.name, width)
        self._loader.launch(chosen.file, chosen.name,
                            (ceil(tokens / chosen.rows) * batch * heads,), (2 * chosen.rows,),
                            arguments, chosen.shared_bytes)

    def _arguments(self, q, k, v):
        """Return (sizes and strides as the kernels take them, the arrays, copied if necessary)."""
        _, queries, heads, width = q.shape
        keys, kv_heads = k.shape[1:3]
        assert heads % kv_heads == 0, (q.shape, k.shape)
        (q,), q_stride, _ = self._alike(True, q)
        (k, v), kv_stride, kv_apart = self._alike(False, k, v)
        return (queries, keys, heads, kv_heads, width, q_stride, kv_stride,
                np.int64(kv_apart)), (q, k, v)

    def _alike(self, whole, *arrays):
        """Return (arrays, values from token to token, values from sequence to sequence).

        The arrays are copied unless all have the same strides and their heads have no gaps. whole:
        their sequences must have no gaps either.
        """
        first = arrays[0]
        _, tokens, heads, width = first.shape
        (apart, row), item = first.strides[:2], first.itemsize
        if whole:
            apart = tokens * row
        if any(x.strides != (apart, row, width * item, item) for x in arrays):
            arrays = tuple(self._xp.ascontiguousarray(x) for x in arrays)
            row = heads * width * item
            apart = tokens * row
        return arrays, row // item, apart // item

    def _ids(self, x):
        assert x.dtype == np.int64, x.dtype
        return self._xp.ascontiguousarray(x)
