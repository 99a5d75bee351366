"""GEMM and attention in the tile model: a kernel works on tiles, the compiler chooses the threads.

The package `cuda-tile` (extra `tile`) compiles these functions for the device. If the device has
wgmma, TMA copies and a pipeline over k, the compiler uses them; none of it is written here. `ct` is
that package or, in tests, a stand-in on NumPy arrays.
"""

from math import ceil, inf
from typing import Any

import numpy as np

from mpipar.ops.cuda.attention import LOG2_E, Attention
from mpipar.ops.cuda.gemm import checked
from mpipar.ops.signature import Array

TILES = {4: (64, 64, 32), 2: (128, 128, 64)}  # bytes of an element: tm, tn, tk
LOWEST = float(np.finfo(np.float32).min)  # the maximum of an empty set; finite, see common.cuh
ATTENTION_TILES = {4: (64, 32), 2: (128, 64)}  # bytes of an element: tq, tk


class TileModelGemm:
    """The product by the kernel below, with the interface of `gemm.BlasGemm`."""

    def __init__(self, xp: Any, ct: Any) -> None:
        self._xp, self._ct = xp, ct
        self._kernel = gemm_kernel(ct)

    def __call__(self, a: Array, b: Array, out: Array, accumulate: bool = False) -> None:
        """Write a b to out (or add it); a (M, K), b (K, N), out (M, N)."""
        if out.size == 0:  # as in TileGemm
            return
        a, b, out = checked(a, b, out)
        tiles = TILES[a.itemsize]
        grid = tuple(ceil(n / tile) for n, tile in zip(out.shape, tiles[:2], strict=True))
        self._ct.launch(
            self._xp.cuda.get_current_stream(),
            grid,
            self._kernel,
            (a, b, out, int(accumulate), *tiles),
        )


def gemm_kernel(ct: Any) -> Any:
    """Return the kernel c = a b (+ c): a (M, K), b (K, N), c (M, N), any strides.

    A block computes tm x tn of c in steps of tk. Tile sizes are powers of two. Sums are float32.
    accumulate: 1 adds to c, 0 does not read it. Elements outside an array are read as zero and not
    written. Traffic of a step: (tm + tn) tk elements per 2 tm tn tk FLOPs.
    """
    constant = ct.Constant[int]

    @ct.kernel
    def gemm(a, b, c, accumulate: constant, tm: constant, tn: constant, tk: constant):
        row, column = ct.bid(0), ct.bid(1)
        total = ct.full((tm, tn), 0.0, dtype=ct.float32)
        for k in range(ct.num_tiles(a, 1, shape=(tm, tk))):
            left = ct.load(a, (row, k), shape=(tm, tk), padding_mode=ct.PaddingMode.ZERO)
            right = ct.load(b, (k, column), shape=(tk, tn), padding_mode=ct.PaddingMode.ZERO)
            total = ct.mma(left, right, total)
        if accumulate:
            total = total + ct.astype(ct.load(c, (row, column), shape=(tm, tn)), ct.float32)
        ct.store(c, (row, column), ct.astype(total, c.dtype))

    return gemm


class TileModelAttention(Attention):
    """`Attention` whose forward pass is the kernel below. The backward kernels stay the same."""

    def __init__(self, xp: Any, loader: Any, ct: Any) -> None:
        super().__init__(xp, loader)
        self._ct = ct
        self._kernel = attention_kernel(ct)

    def forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array, wide: bool = False
    ) -> tuple[Array, Array]:
        """Return (y (B, Tq, H, d), stats (B, H, Tq, 2)), as `Attention.forward`."""
        batch, queries, heads, width = q.shape
        y = self._xp.empty(q.shape, np.float32 if wide else q.dtype)
        stats = self._row_values(q, 2)
        tq, tk = ATTENTION_TILES[q.itemsize]
        self._ct.launch(
            self._xp.cuda.get_current_stream(),
            (ceil(queries / tq), heads, batch),
            self._kernel,
            (
                q,
                k,
                v,
                q_pos,
                k_pos,
                y,
                stats[..., 0],
                stats[..., 1],
                width**-0.5,
                heads // k.shape[2],
                tq,
                tk,
                1 << (width - 1).bit_length(),
            ),
        )
        return y, stats


def attention_kernel(ct: Any) -> Any:
    """Return the kernel of causal attention: y and both stats of q, k, v, positions, any strides.

    q, y (B, Tq, H, d), k, v (B, Tk, Hkv, d), q_pos (Tq,), k_pos (Tk,), tops, sums (B, H, Tq). A
    block computes tq queries of one head in steps of tk keys, as `flash_forward.cu` does. `group`
    query heads share a key head. `width` is d, rounded up to a power of two and padded with zeros.
    Traffic of a step: 2 tk width elements per 4 tq tk width FLOPs.
    """
    constant = ct.Constant[int]

    @ct.kernel
    def attention(
        q,
        k,
        v,
        q_pos,
        k_pos,
        y,
        tops,
        sums,
        factor: ct.Constant[float],
        group: constant,
        tq: constant,
        tk: constant,
        width: constant,
    ):
        tile, head, row = ct.bid(0), ct.bid(1), ct.bid(2)
        kv_head = head // group
        zero = ct.PaddingMode.ZERO
        queries = ct.reshape(
            ct.load(q, (row, tile, head, 0), shape=(1, tq, 1, width), padding_mode=zero),
            (tq, width),
        )
        at = ct.reshape(ct.load(q_pos, (tile,), shape=(tq,), padding_mode=zero), (tq, 1))
        last = ct.max(at)
        top = ct.full((tq, 1), LOWEST, dtype=ct.float32)
        total = ct.full((tq, 1), 0.0, dtype=ct.float32)
        out = ct.full((tq, width), 0.0, dtype=ct.float32)
        for j in range(ct.num_tiles(k, 1, shape=(1, tk, 1, width))):
            of_keys = ct.load(k_pos, (j,), shape=(tk,), padding_mode=zero)
            if ct.min(of_keys) <= last:
                keys = ct.reshape(
                    ct.load(k, (row, j, kv_head, 0), shape=(1, tk, 1, width), padding_mode=zero),
                    (tk, width),
                )
                values = ct.reshape(
                    ct.load(v, (row, j, kv_head, 0), shape=(1, tk, 1, width), padding_mode=zero),
                    (tk, width),
                )
                scores = (
                    ct.mma(queries, ct.transpose(keys), ct.full((tq, tk), 0.0, dtype=ct.float32))
                    * factor
                )
                inside = j * tk + ct.arange(tk, dtype=ct.int32) < k.shape[1]
                seen = ct.reshape(inside, (1, tk)) & (ct.reshape(of_keys, (1, tk)) <= at)
                scores = ct.where(seen, scores, -inf)
                largest = ct.maximum(top, ct.max(scores, axis=1, keepdims=True))
                shrink = ct.exp2((top - largest) * LOG2_E)
                top = largest
                p = ct.exp2((scores - top) * LOG2_E)
                total = total * shrink + ct.sum(p, axis=1, keepdims=True)
                out = ct.mma(ct.astype(p, v.dtype), values, out * shrink)
        out = out / ct.where(total == 0.0, 1.0, total)  # 0: a query saw no key
        ct.store(y, (row, tile, head, 0), ct.reshape(ct.astype(out, y.dtype), (1, tq, 1, width)))
        ct.store(tops, (row, head, tile), ct.reshape(top, (1, 1, tq)))
        ct.store(sums, (row, head, tile), ct.reshape(total, (1, 1, tq)))

    return attention
