"""Causal attention in tiles, as functions of device arrays: the scores are never in memory.

float32 arrays go to plain multiply-adds, bfloat16 and float16 to tensor cores; sums, statistics and
`lse` are float32. B batch, T tokens, H heads, d width of a head, at most MOST_WIDTH. Query i sees
key j if positions[j] <= positions[i]; every query sees itself.
"""

from collections import namedtuple
from math import ceil, e, log, log2

import numpy as np

from mpipar.ops.cuda.ladder import C_TYPES

# Bytes of an element: kernel: width of a tile: its rows, its columns, and the blocks that a
# processor's registers are enough for. A head that is narrower is filled up with zeros. No block
# wants more than 99 KiB of shared memory, which compute capabilities 8.6 and 8.9 have.
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


def delta_name(dtype):
    """Return the name expression of flash_delta."""
    return f"flash_delta<{C_TYPES[dtype]}, {DELTA_THREADS}>"


def used():
    """Return file -> name expressions of what `Attention` runs."""
    files = {"flash_backward.cu": tuple(delta_name(dtype) for dtype in ITEM_BYTES)}
    for kernel, file in FILES.items():
        files[file] = files.get(file, ()) + tuple(
            tile(kernel, dtype, width).name for dtype in ITEM_BYTES for width in WIDTHS)
    return files


class Attention:
    """The kernels through one loader; results are new arrays of `xp` unless the text says else."""

    def __init__(self, xp, loader):
        self._xp, self._loader = xp, loader

    def forward(self, q, k, v, positions, factor):
        """Return (y (B, T, H, d), lse (B, H, T)) of q, k, v (B, T, H, d), positions (T,).

        y = softmax(factor q k^T) v over the keys that are seen, lse = log of the sum of
        exp(factor q k^T) over them. Views of a packed (B, T, 3, H, d) array are taken as they are.
        """
        y = self._xp.empty(q.shape, q.dtype)
        lse = self._xp.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
        (q, k, v), stride = self._alike(q, k, v)
        self._walk("flash_forward", q, stride, q, k, v, self._ids(positions), float(factor), y, lse)
        return y, lse

    def backward(self, dy, q, k, v, y, lse, positions, factor, out=None):
        """Return (dq, dk, dv), each (B, T, H, d), of what `forward` took and returned.

        out: where to write them, if anywhere; three views of a packed array will do.
        """
        batch, tokens, heads, width = q.shape
        dy, y = self._xp.ascontiguousarray(dy), self._xp.ascontiguousarray(y)
        positions = self._ids(positions)
        out = out or tuple(self._xp.empty(q.shape, q.dtype) for _ in range(3))
        (q, k, v), stride = self._alike(q, k, v)
        (dq, dk, dv), out_stride = self._alike(*out)
        assert all(x is given for x, given in zip((dq, dk, dv), out, strict=True)), "a copy"
        delta = self._xp.empty(lse.shape, np.float32)
        rows = batch * tokens * heads
        self._loader.launch("flash_backward.cu", delta_name(q.dtype.name),
                            (ceil(rows / (DELTA_THREADS // 32)),), (DELTA_THREADS,),
                            (rows, tokens, heads, width, y, dy, delta))
        given = (out_stride, q, k, v, dy, positions, float(factor), lse, delta)
        self._walk("flash_dq", q, stride, *given, dq)
        self._walk("flash_dkv", q, stride, *given, dk, dv)
        return dq, dk, dv

    def _walk(self, kernel, q, stride, *arguments):
        """Start a kernel with a block for each tile of rows of each head."""
        batch, tokens, heads, width = q.shape
        chosen = tile(kernel, q.dtype.name, width)
        self._loader.launch(chosen.file, chosen.name,
                            (ceil(tokens / chosen.rows) * batch * heads,), (2 * chosen.rows,),
                            (tokens, heads, width, stride, *arguments), chosen.shared_bytes)

    def _alike(self, *arrays):
        """Return arrays whose tokens lie equally far apart, copied if need be, and how far."""
        first = arrays[0]
        _, tokens, heads, width = first.shape
        row, item = first.strides[1], first.itemsize
        usual = (tokens * row, row, width * item, item)
        if any(x.strides != usual for x in arrays):
            arrays = tuple(self._xp.ascontiguousarray(x) for x in arrays)
            row = heads * width * item
        return arrays, row // item

    def _ids(self, x):
        assert x.dtype == np.int64, x.dtype
        return self._xp.ascontiguousarray(x)
