"""Causal attention on a GPU in tiles, which keep two numbers per query: no score is in memory.

float32 arrays use plain multiply-adds, bfloat16 and float16 use tensor cores. Sums and `stats` are
float32. Letters as in `array_ops`. Heads wider than MOST_WIDTH get the plain formula with whole
scores, which are float32 until they are probabilities.
"""

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpipar.ops.cuda.kernels import C_TYPES
from mpipar.ops.cupy_ops import CupyOps
from mpipar.ops.signature import Array, Shape, ThreeArrays

# Bytes of an element: kernel: width of a tile: its rows, its columns, and the number of blocks for
# which a processor has enough registers. A narrower head is padded with zeros. No block needs more
# than 99 KiB of shared memory, which compute capabilities 8.6 and 8.9 have.
TILES = {
    4: {
        "flash_forward": {32: (64, 32, 3), 64: (64, 32, 3), 128: (64, 16, 2)},
        "flash_backward": {32: (64, 64, 2), 64: (64, 32, 2), 128: (32, 16, 3)},
    },
    2: {
        "flash_forward": {32: (128, 64, 2), 64: (128, 32, 2), 128: (128, 32, 1)},
        "flash_backward": {32: (128, 64, 1), 64: (128, 64, 1), 128: (64, 16, 2)},
    },
}
# Backward sums dq in parts (see `flash_backward.cu`): as many as give BLOCKS blocks, a few for each
# processor of the largest GPUs, but at most MOST_PARTS, because each takes 4 bytes per element of
# q.
BLOCKS, MOST_PARTS = 512, 8
WIDTHS = (32, 64, 128)
MOST_WIDTH = WIDTHS[-1]
DELTA_THREADS = 128


class Tile(NamedTuple):
    """A kernel for heads of some width: its name expression, and its tile."""

    file: str
    name: str
    rows: int
    columns: int
    width: int
    shared_bytes: int


def tile(kernel: str, dtype: str, width: int) -> Tile:
    """Return the Tile of a kernel of TILES for heads of `width`, by NumPy's name of the type."""
    itemsize = 4 if dtype == "float32" else 2
    width = next(one for one in WIDTHS if width <= one)
    rows, columns, blocks = TILES[itemsize][kernel][width]
    name = f"{kernel}<{C_TYPES[dtype]}, {width}, {rows}, {columns}, {blocks}>"
    row_bytes, backward = width * itemsize + 16, kernel == "flash_backward"
    shared_bytes = ((2 if backward else 1) * rows + 4 * columns) * row_bytes
    if itemsize == 4 or backward:  # a tile of rows by columns
        shared_bytes += rows * (columns * itemsize + 16)
    if backward:  # per-query numbers
        shared_bytes += 2 * columns * 16
    return Tile(f"{kernel}.cu", name, rows, columns, width, shared_bytes)


def of_parts(chosen: Tile) -> Tile:
    """Return the Tile of flash_dq, which adds up the parts that flash_backward has computed."""
    return chosen._replace(name=chosen.name.replace("flash_backward", "flash_dq"), shared_bytes=0)


def parts_shape(q: Array, k: Array) -> Shape:
    """Return the shape of the float32 parts of dq; it depends only on shapes, not on the GPU."""
    batch, queries, heads, width = q.shape
    keys, kv_heads = k.shape[1:3]
    chosen = tile("flash_backward", q.dtype.name, width)
    parts = min(ceil(keys / chosen.rows), ceil(BLOCKS / (batch * kv_heads)), MOST_PARTS)
    return (parts, batch, heads, ceil(queries / chosen.columns) * chosen.columns, chosen.width)


def delta_name(y_dtype: str, dtype: str) -> str:
    """Return the name expression of flash_delta for y and dy of these types."""
    return f"flash_delta<{C_TYPES[y_dtype]}, {C_TYPES[dtype]}, {DELTA_THREADS}>"


class AttentionOps(CupyOps):
    """The functions of attention, each of which is one kernel or a few."""

    tiled_head_width = MOST_WIDTH

    def attention_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Any]:
        """Return (y, saved): y itself and stats (B, H, Tq, 2), or probs (B, H, Tq, Tk)."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_forward(q, k, v, q_pos, k_pos)
        saved = self._forward_tiles(q, k, v, q_pos, k_pos, q.dtype)
        return saved[0], saved

    def attention_block_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Array]:
        """Return (y (B, Tq, H, d), stats (B, H, Tq, 2)) over these keys; y = 0 without keys."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_block_forward(q, k, v, q_pos, k_pos)
        return self._forward_tiles(q, k, v, q_pos, k_pos, np.float32)

    def _forward_tiles(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array, dtype: DTypeLike
    ) -> tuple[Array, Array]:
        """Return (y (B, Tq, H, d) in a type, stats (B, H, Tq, 2)).

        Views of a packed (B, T, 3, H, d) array are taken as they are, and so are the first keys of
        a longer array.
        """
        batch, queries, heads, width = q.shape
        y = self.xp.empty(q.shape, dtype)
        stats = self.xp.empty((batch, heads, queries, 2), np.float32)
        sizes, arrays = self._arguments(q, k, v)
        chosen = tile("flash_forward", q.dtype.name, width)
        self._start(
            chosen,
            ceil(queries / chosen.rows) * batch * heads,
            *sizes,
            *arrays,
            self._ids(q_pos),
            self._ids(k_pos),
            width**-0.5,
            int(y.dtype == np.float32),
            y,
            stats,
        )
        return y, stats

    def attention_delta(self, dy: Array, y: Array) -> Array:
        """Return delta (B, H, Tq), the sum of dy y over a head; y of dy's type or float32."""
        batch, queries, heads, width = y.shape
        delta = self.xp.empty((batch, heads, queries), np.float32)
        y, dy = self._whole(y), self._whole(dy)
        self.loader.launch(
            "flash_backward.cu",
            delta_name(y.dtype.name, dy.dtype.name),
            (ceil(delta.size / (DELTA_THREADS // 32)),),
            (DELTA_THREADS,),
            (delta.size, queries, heads, width, y, dy, delta),
        )
        return delta

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
        """Return (dq, dk, dv), written to the three arrays `out` if they are given."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_backward_input(dy, q, k, v, saved, q_pos, k_pos, out=out)
        results = out or tuple(self.xp.empty(x.shape, x.dtype) for x in (q, k, v))
        y, stats = saved
        return self._backward_tiles(
            dy, (q, k, v), stats, self.attention_delta(dy, y), (q_pos, k_pos), results
        )

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
        """Return the parts of (dq, dk, dv) due to these keys; stats and delta are over all keys."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_block_backward(
                dy, q, k, v, stats, delta, q_pos=q_pos, k_pos=k_pos
            )
        results = tuple(self.xp.empty(x.shape, np.float32) for x in (q, k, v))
        return self._backward_tiles(dy, (q, k, v), stats, delta, (q_pos, k_pos), results)

    def _backward_tiles(
        self,
        dy: Array,
        qkv: ThreeArrays,
        stats: Array,
        delta: Array,
        positions: tuple[Array, Array],
        results: Sequence[Array],
    ) -> ThreeArrays:
        """Write (dq, dk, dv) to `results`, of q's type or of float32, and return them.

        They may be views of a packed array.
        """
        q, k, _ = qkv
        wide = int(results[0].dtype == np.float32)
        (dq,), dq_stride, _ = self._alike(True, results[0])
        (dk, dv), dkv_stride, _ = self._alike(True, *results[1:])
        sizes, arrays = self._arguments(*qkv)
        (batch, queries, heads, width), factor = q.shape, q.shape[-1] ** -0.5
        chosen = tile("flash_backward", q.dtype.name, width)
        parts = self.xp.empty(parts_shape(q, k), np.float32)
        self._start(
            chosen,
            len(parts) * batch * k.shape[2],
            *sizes,
            dkv_stride,
            len(parts),
            *arrays,
            self._whole(dy),
            *map(self._ids, positions),
            factor,
            *map(self._whole, (stats, delta)),
            wide,
            parts,
            dk,
            dv,
        )
        self._start(
            of_parts(chosen),
            ceil(queries / chosen.columns) * batch * heads,
            queries,
            heads,
            width,
            dq_stride,
            len(parts),
            parts,
            factor,
            wide,
            dq,
        )
        for asked, made in zip(results, (dq, dk, dv), strict=True):
            if made is not asked:
                asked[...] = made
        return results[0], results[1], results[2]

    def _start(self, chosen: Tile, blocks: int, *arguments: Any) -> None:
        """Start a kernel with two threads for each row of its tile: a warp has 16 rows."""
        self.loader.launch(
            chosen.file, chosen.name, (blocks,), (2 * chosen.rows,), arguments, chosen.shared_bytes
        )

    def _arguments(self, q: Array, k: Array, v: Array) -> tuple[tuple[Any, ...], tuple[Array, ...]]:
        """Return (sizes and strides as the kernels take them, the arrays, copied if necessary)."""
        _, queries, heads, width = q.shape
        keys, kv_heads = k.shape[1:3]
        assert heads % kv_heads == 0, (q.shape, k.shape)
        (q,), q_stride, _ = self._alike(True, q)
        (k, v), kv_stride, kv_apart = self._alike(False, k, v)
        return (queries, keys, heads, kv_heads, width, q_stride, kv_stride, np.int64(kv_apart)), (
            q,
            k,
            v,
        )

    def _alike(self, whole: bool, *arrays: Array) -> tuple[tuple[Array, ...], int, int]:
        """Return (arrays, elements between tokens, elements between sequences).

        The arrays are copied unless all have the same strides and their heads have no gaps. whole:
        whether their sequences must have no gaps either.
        """
        first = arrays[0]
        _, tokens, heads, width = first.shape
        (apart, row), item = first.strides[:2], first.itemsize
        if whole:
            apart = tokens * row
        if any(x.strides != (apart, row, width * item, item) for x in arrays):
            arrays = tuple(self._whole(x) for x in arrays)
            row = heads * width * item
            apart = tokens * row
        return arrays, row // item, apart // item
