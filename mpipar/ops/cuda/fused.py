"""The array functions on a GPU in fused kernels: `--kernels fused`, the default of `--device cuda`.

Products and embeddings are those of `cupy_ops`. Every chain of elementwise functions and sums
between them is one kernel. The type of the arrays selects it: float32, bfloat16 or float16. Kernels
read and round 16-bit operands themselves, and compute in float32. There are none for float64.

Statistics, partial sums and AdamW's buffers are float32. Letters: N rows (the leading dimensions),
D columns, V columns of a vocabulary shard. Sums over rows go through slabs, not atomics, so every
run gives the same bits.
"""

from collections.abc import Sequence
from math import ceil
from types import MappingProxyType
from typing import Any

import numpy as np

from mpipar.ops.array_ops import valid_columns
from mpipar.ops.arrays import AdamWStep, as_rows
from mpipar.ops.cuda.attention import AttentionOps
from mpipar.ops.cuda.epilogues import Epilogues
from mpipar.ops.cuda.kernels import C_TYPES, OLDEST_DEVICE
from mpipar.ops.cupy_ops import CupyOps
from mpipar.ops.functions import FUNCTIONS, by_kernel
from mpipar.ops.signature import Array, Function, Runs

ROW_THREADS = 128  # threads that share a long row
WARPS = 4  # of a block whose warps take a row each, as in rows.cuh
NULL = np.int64(0)  # a pointer to nothing
ELEMENT_THREADS = 256
ELEMENTS = 8  # per thread, where all threads share the elements: 16 bytes or twice 16
MOST_BLOCKS = 1 << 16  # of kernels whose threads take several elements each
MOST_BLOCKS_OF_RUN = 1 << 10  # of AdamW: with them the longest run alone fills a wide GPU
SLAB_THREADS, STRIP_BYTES = 256, 128  # as in columns.cuh
SLAB_ROWS = 32  # at least: a thread takes one of them in each of its turns
MOST_SLABS = 64  # enough blocks for a wide GPU; the second step reads this many partial sums


def by_type(kernel: str, dtype: str) -> str:
    """Return the name expression of a kernel without a tile size."""
    return f"{kernel}<{C_TYPES[dtype]}>"


def by_row(kernel: str, dtype: str) -> str:
    """Return the name expression of a kernel whose blocks take a row each."""
    return f"{kernel}<{C_TYPES[dtype]}, {ROW_THREADS}>"


class FusedOps(AttentionOps):
    """The array functions of `CupyOps` in float32; kernels replace the plain ones."""

    oldest_device = OLDEST_DEVICE

    def __init__(self, gemm: str = "blas", host_rank: int = 0) -> None:
        super().__init__("float32", gemm, host_rank)
        self._done = self.xp.zeros((0,), np.int32)  # see columns.cuh
        self._tables: dict[bytes, Array] = {}  # of AdamW, by their contents
        self._epilogues = (
            Epilogues(self.xp, self._blas, speaks=host_rank == 0) if gemm == "blas" else None
        )

    # Products with what follows them, where cuBLASLt has both as one function.

    def matmul_bias(self, x: Array, w: Array, b: Array | None) -> Array:
        """Return x w (..., M), plus b if there is one."""
        if b is not None and self._epilogues is not None:
            y = self.xp.empty((*x.shape[:-1], w.shape[1]), x.dtype)
            if self._epilogues(as_rows(x), w, as_rows(y), self._whole(b), adds=False):
                return y
            del y  # before another one is made
        return super().matmul_bias(x, w, b)

    def matmul_tn_add_sums(self, x: Array, y: Array, out: Array, sums: Array | None) -> None:
        """Add x^T y to out as `matmul_tn_add` does, and the sum of the rows of y to sums (M,)."""
        if sums is not None and self._epilogues is not None:
            made = self.xp.empty(sums.shape, sums.dtype)  # which the product's kernel overwrites
            if self._epilogues(as_rows(x).T, as_rows(y), out, made, adds=True):
                self.accumulate(sums, made)
                return
        super().matmul_tn_add_sums(x, y, out, sums)

    # How kernels are started.

    # Each gets the kernel, the array x that it walks over, what it reads, and what it writes.

    def _elements(
        self,
        file: str,
        name: str,
        x: Array,
        reads: Sequence[Any],
        writes: Sequence[Array],
        each: int = ELEMENTS,
    ) -> None:
        """Start a kernel whose threads share the elements of x, `each` elements per thread."""
        blocks = min(max(1, ceil(x.size / (ELEMENT_THREADS * each))), MOST_BLOCKS)
        self.loader.launch(
            file, name, (blocks,), (ELEMENT_THREADS,), (np.int64(x.size), *reads, *writes)
        )

    def _warps(
        self, file: str, name: str, x: Array, reads: Sequence[Any], writes: Sequence[Array]
    ) -> None:
        """Start a kernel with a warp for each row of x (..., D)."""
        if x.size:
            rows, columns = x.size // x.shape[-1], x.shape[-1]  # a view as rows may be a copy
            grid, block = (ceil(rows / WARPS),), (32, WARPS)
            self.loader.launch(file, name, grid, block, (rows, columns, *reads, *writes))

    def _rows(self, kernel: str, x: Array, *arguments: Any) -> None:
        """Start a kernel of cross-entropy with a block for each row of x (N, V)."""
        rows, columns = x.shape
        if rows:
            self.loader.launch(
                "cross_entropy.cu",
                by_row(kernel, x.dtype.name),
                (rows,),
                (ROW_THREADS,),
                (columns, *arguments),
            )

    def _slabs(
        self, file: str, name: str, x: Array, reads: Sequence[Any], writes: Sequence[Array]
    ) -> None:
        """Start a kernel that adds sums over the rows of x, computed in slabs."""
        if x.size:
            rows, columns = x.size // x.shape[-1], x.shape[-1]  # a view as rows may be a copy
            slabs = min(ceil(rows / SLAB_ROWS), MOST_SLABS)
            strips = ceil(columns * x.itemsize / STRIP_BYTES)
            if self._done.size < strips:
                self._done = self.xp.zeros((strips,), np.int32)
            partial = self.xp.empty((len(writes), slabs, columns), np.float32)
            self.loader.launch(
                file,
                name,
                (strips, slabs),
                (SLAB_THREADS,),
                (rows, columns, *reads, partial, self._done, *writes),
            )

    # Functions that are one kernel: its file, its name, and how it is started.
    _chains = MappingProxyType(
        {
            "gelu_forward": ("gelu.cu", "gelu_forward", _elements),
            "gelu_backward_input": ("gelu.cu", "gelu_backward", _elements),
            "swiglu_forward": ("swiglu.cu", "swiglu_forward", _warps),
            "swiglu_backward_input": ("swiglu.cu", "swiglu_backward", _warps),
            "layernorm_forward": ("norm.cu", "layernorm_forward", _warps),
            "layernorm_backward_input": ("norm.cu", "layernorm_backward", _warps),
            "layernorm_backward_weight": ("norm.cu", "layernorm_slabs", _slabs),
            "rmsnorm_forward": ("norm.cu", "rmsnorm_forward", _warps),
            "rmsnorm_backward_input": ("norm.cu", "rmsnorm_backward", _warps),
            "rmsnorm_backward_weight": ("norm.cu", "rmsnorm_slabs", _slabs),
        }
    )
    vars().update({name: by_kernel(name) for name in _chains})

    def _run(
        self,
        function: Function,
        arguments: Sequence[Any],
        results: Sequence[Array],
        inner: Sequence[int | None],
    ) -> None:
        """Start the kernel of a function; it adds to arrays that the function writes to."""
        file, kernel, start = self._chains[function.name]
        walked = results[0] if function.name == "swiglu_forward" else arguments[0]
        parts = function.takes
        reads: list[Any] = [
            NULL
            if x is None
            else float(x)
            if part.dims is None
            else x
            if x.flags.c_contiguous
            else self._whole(x)
            for part, x in zip(parts, arguments, strict=True)
            if not part.written
        ]
        added = [x for part, x in zip(parts, arguments, strict=True) if part.written]
        for x in added:
            assert x.dtype == np.float32, (function.name, x.dtype)
            self._in_place(x)
        assert {x.dtype for x in reads[:2]} == {walked.dtype}, (function.name, walked.dtype)
        if inner[1] is not None and arguments[1:]:  # backward: what went into forward, by rows
            like = results[0] if results else walked
            assert arguments[1].shape == like.shape, (function.name, arguments[1].shape, like.shape)
        start(self, file, by_type(kernel, walked.dtype.name), walked, reads, [*results, *added])

    def bias_backward_weight(self, dy: Array, db: Array) -> None:
        """Add the sum of dy (..., D) over its rows to db (D,)."""
        assert dy.shape[-1:] == db.shape, (dy.shape, db.shape)
        name = f"column_sums<{C_TYPES[dy.dtype.name]}, {C_TYPES[db.dtype.name]}>"
        self._slabs("columns.cu", name, dy, [self._whole(dy)], [self._in_place(db)])

    # Rotary positions.

    def rope_forward(self, x: Array, positions: Array, table: Array) -> Array:
        """Rotate x (B, T, H, d) in place by the angles of its positions (T,) or (B, T)."""
        return self._turn(x, positions, table, 1.0)

    def rope_backward_input(self, dy: Array, positions: Array, table: Array) -> Array:
        """Rotate dy (B, T, H, d) in place by the angles of its positions in reverse."""
        return self._turn(dy, positions, table, -1.0)

    def _turn(self, x: Array, positions: Array, table: Array, sign: float) -> Array:
        """Rotate x in place; its heads must have no gaps, and its sequences follow one another."""
        batch, tokens, heads, width = x.shape
        row, item = x.strides[1] if tokens > 1 else x.strides[0], x.itemsize
        lengths = zip(x.shape, x.strides, (tokens * row, row, width * item, item), strict=True)
        assert all(size == 1 or have == due for size, have, due in lengths), (x.shape, x.strides)
        assert positions.size in (tokens, batch * tokens), (positions.shape, x.shape)
        assert table.dtype == np.float32, table.dtype
        if x.size:
            self.loader.launch(
                "rope.cu",
                by_type("rotate", x.dtype.name),
                (ceil(batch * tokens / WARPS),),
                (32, WARPS),
                (
                    batch * tokens,
                    width // 2,
                    heads,
                    np.int64(row // item),
                    positions.size,
                    self._ids(positions),
                    self._in_place(table),
                    sign,
                    x,
                ),
            )
        return x

    # Cross-entropy over a vocabulary shard.

    def cross_entropy_forward(
        self, logits: Array, targets: Array, start: int, num_valid: int
    ) -> Array:
        """Return (N, 3) float32: maximum, sum of exp(logit - maximum), logit of the target or 0.

        logits (N, V), targets (N,) int64.
        """
        valid = valid_columns(logits, start, num_valid)
        stats = self.xp.empty((logits.shape[0], 3), np.float32)
        self._rows(
            "cross_entropy_stats",
            logits,
            valid,
            self._in_place(logits),
            self._ids(targets),
            np.int64(start),
            stats,
        )
        return stats

    def cross_entropy_combine(self, stats: Array) -> tuple[Array, Array]:
        """Return (loss (N,), sums (N, 2)) in float32 from the stats of all shards (shards, N, 3).

        sums: maximum and sum of exp(logit - maximum) over the whole vocabulary.
        """
        shards, rows, _ = stats.shape
        assert stats.dtype == np.float32, stats.dtype
        loss, sums = (self.xp.empty(shape, np.float32) for shape in ((rows,), (rows, 2)))
        arguments = [shards, self._whole(stats)]
        self._elements(
            "cross_entropy.cu", "cross_entropy_combine", loss, arguments, [loss, sums], 1
        )
        return loss, sums

    def cross_entropy_backward_input(
        self, logits: Array, targets: Array, sums: Array, start: int, num_valid: int, scale: float
    ) -> Array:
        """Write (softmax - onehot) scale over logits (N, V), 0 over padding; return that array.

        sums (N, 2) float32: maximum and sum of exp(logit - maximum) over all shards.
        """
        valid = valid_columns(logits, start, num_valid)
        self._rows(
            "cross_entropy_backward",
            logits,
            valid,
            self._in_place(logits),
            self._ids(targets),
            self._whole(sums),
            np.int64(start),
            float(scale),
        )
        return logits

    # Updates.

    def adamw_runs(
        self,
        data: Array,
        grad: Array,
        m: Array,
        v: Array,
        runs: Runs,
        by: AdamWStep,
        copy: Array | None = None,
    ) -> None:
        """Update the flat float32 buffers data, m, v in one launch, with a row of the grid per run.

        copy: a flat 16-bit buffer that also receives the new data.
        """
        buffers = [self._in_place(x) for x in (data, grad, m, v)]
        assert {(x.dtype.name, x.shape) for x in buffers} == {("float32", data.shape)}, data.dtype
        if not runs:
            return
        table = np.array([(run.start, run.stop, decays) for decays, run in runs], np.int64)
        longest = int((table[:, 1] - table[:, 0]).max())
        blocks = min(ceil(longest / (ELEMENT_THREADS * ELEMENTS)), MOST_BLOCKS_OF_RUN)
        numbers = (
            by.beta1,
            1.0 - by.beta1,
            by.beta2,
            1.0 - by.beta2,
            1.0 - by.lr * by.weight_decay,
            by.lr / (1.0 - by.beta1**by.step),
            (1.0 - by.beta2**by.step) ** -0.5,
            by.eps,
        )
        key = table.tobytes()
        if key not in self._tables:  # it stays on the device: every step uses the same ones
            self._tables[key] = self.xp.asarray(table)
        name = "adamw" if copy is None else by_type("adamw_with_copy", copy.dtype.name)
        copies = () if copy is None else (self._in_place(copy),)
        self.loader.launch(
            "adamw.cu",
            name,
            (blocks, len(runs)),
            (ELEMENT_THREADS,),
            (self._tables[key], *buffers, *map(float, numbers), *copies),
        )

    # Every function that a kernel here computes takes 16-bit operands as they are.
    takes_16_bits = (
        *CupyOps.takes_16_bits,
        *(FUNCTIONS.keys() & {*vars(), *vars(AttentionOps)}),
    )
