"""The fused kernels between the products, as functions of device arrays.

The type of the arrays chooses the kernel: float32, bfloat16 or float16. Statistics, partial sums
and AdamW's buffers are float32. Letters: N rows (the leading dimensions), D columns, V columns of a
vocabulary shard. Sums over rows go through slabs, not atomics, so every run gives the same bits.
"""

from math import ceil

import numpy as np

from mpipar.ops.cuda.ladder import C_TYPES

ROW_THREADS = 128  # threads that share a row
ELEMENT_THREADS = 256
MOST_BLOCKS = 1 << 16  # of kernels whose threads take several elements each
MOST_BLOCKS_OF_RUN = 1 << 10  # of AdamW: the longest run alone fills a wide GPU with them
SLAB_THREADS = 8  # as in columns.cuh
MOST_SLABS = 64  # enough blocks for a wide GPU; the second step reads this many partial sums
NORM_KERNELS = "layernorm_forward rmsnorm_forward layernorm_backward rmsnorm_backward"
USED_TYPES = ("float32", "bfloat16", "float16")


def by_type(kernel, dtype):
    """Return the name expression of a kernel without a tile size."""
    return f"{kernel}<{C_TYPES[dtype]}>"


def by_row(kernel, dtype):
    """Return the name expression of a kernel whose blocks take a row each."""
    return f"{kernel}<{C_TYPES[dtype]}, {ROW_THREADS}>"


def used():
    """Return file -> name expressions of what `Fused` runs."""
    each = {
        "gelu.cu": (by_type, "gelu_forward bias_gelu_forward gelu_backward"),
        "swiglu.cu": (by_type, "swiglu_forward swiglu_backward"),
        "rope.cu": (by_type, "rotate"),
        "columns.cu": (by_type, "column_sums add_slabs"),
        "norm.cu": (by_row, NORM_KERNELS),
        "cross_entropy.cu": (by_row, "cross_entropy_stats cross_entropy_backward"),
        "softmax.cu": (by_row, "causal_softmax_forward causal_softmax_backward"),
    }
    files = {file: tuple(name(kernel, dtype) for kernel in names.split() for dtype in USED_TYPES)
             for file, (name, names) in each.items()}
    files["norm.cu"] += tuple(by_type(kernel, dtype) for kernel in
                              ("layernorm_slabs", "rmsnorm_slabs") for dtype in USED_TYPES)
    files["adamw.cu"] = ("adamw", *(by_type("adamw_with_copy", dtype) for dtype in USED_TYPES[1:]))
    return files


class Fused:
    """The kernels through one loader; results are new arrays of `xp` unless the text says
    otherwise.
    """

    def __init__(self, xp, loader):
        self._xp, self._loader = xp, loader

    def _elements(self, file, name, count, *arguments):
        """Start a kernel whose threads share `count` elements."""
        blocks = min(max(1, ceil(count / ELEMENT_THREADS)), MOST_BLOCKS)
        self._loader.launch(file, name, (blocks,), (ELEMENT_THREADS,),
                            (np.int64(count), *arguments))

    def _rows(self, file, kernel, x, *arguments):
        """Start a kernel with a block for each row of x (..., D)."""
        rows = x.size // max(1, x.shape[-1])
        if rows:
            self._loader.launch(file, by_row(kernel, x.dtype.name), (rows,), (ROW_THREADS,),
                                (x.shape[-1], *arguments))

    # GELU.

    def gelu_forward(self, x):
        """Return the tanh form of GELU of x."""
        x, y = self._whole(x), self._xp.empty(x.shape, x.dtype)
        self._elements("gelu.cu", by_type("gelu_forward", x.dtype.name), x.size, x, y)
        return y

    def bias_gelu_forward(self, x, b):
        """Add b (D,) to x (..., D) in place and return GELU of the sum."""
        assert (x.shape[-1:], x.dtype) == (b.shape, b.dtype), (x.shape, b.shape)
        y = self._xp.empty(x.shape, x.dtype)
        self._elements("gelu.cu", by_type("bias_gelu_forward", x.dtype.name), x.size,
                       x.shape[-1], self._whole(b), self._in_place(x), y)
        return y

    def gelu_backward_input(self, dy, x):
        """Return dx = dy GELU'(x)."""
        assert (dy.shape, dy.dtype) == (x.shape, x.dtype), (dy.shape, x.shape)
        dy, x, dx = self._whole(dy), self._whole(x), self._xp.empty(x.shape, x.dtype)
        self._elements("gelu.cu", by_type("gelu_backward", x.dtype.name), x.size, dy, x, dx)
        return dx

    # SwiGLU and rotary positions.

    def swiglu_forward(self, h):
        """Return silu(gate) up (..., F) of h (..., 2, F), which is gate and up."""
        h, y = self._whole(h), self._xp.empty((*h.shape[:-2], h.shape[-1]), h.dtype)
        self._elements("swiglu.cu", by_type("swiglu_forward", h.dtype.name), y.size,
                       h.shape[-1], h, y)
        return y

    def swiglu_backward_input(self, dy, h):
        """Return (dh (..., 2, F), and silu(gate) up (..., F) once more)."""
        assert (*dy.shape[:-1], 2, dy.shape[-1]) == h.shape, (dy.shape, h.shape)
        assert dy.dtype == h.dtype, (dy.dtype, h.dtype)
        dh, y = self._xp.empty(h.shape, h.dtype), self._xp.empty(dy.shape, dy.dtype)
        self._elements("swiglu.cu", by_type("swiglu_backward", h.dtype.name), y.size,
                       h.shape[-1], self._whole(dy), self._whole(h), dh, y)
        return dh, y

    def rope_forward(self, x, positions, table):
        """Turn x (B, T, H, d) in place by the angles of its positions (T,) or (B, T)."""
        return self._turn(x, positions, table, 1.0)

    def rope_backward_input(self, dy, positions, table):
        """Turn dy (B, T, H, d) in place by the angles of its positions backwards."""
        return self._turn(dy, positions, table, -1.0)

    def _turn(self, x, positions, table, sign):
        """Turn x in place; its heads must have no gaps, and its sequences follow each other."""
        batch, tokens, heads, width = x.shape
        row, item = x.strides[1], x.itemsize
        assert x.strides == (tokens * row, row, width * item, item), (x.shape, x.strides)
        assert positions.size in (tokens, batch * tokens), (positions.shape, x.shape)
        assert table.dtype == np.float32, table.dtype
        self._elements("rope.cu", by_type("rotate", x.dtype.name), x.size // 2, width // 2, heads,
                       np.int64(row // item), np.int64(positions.size), self._ids(positions),
                       self._in_place(table), sign, x)
        return x

    # Sums over rows.

    def column_sums(self, x, out):
        """Add the sum of x (..., D) over its rows to out (D,)."""
        assert x.shape[-1:] == out.shape, (x.shape, out.shape)
        x = self._whole(x)
        self._slabs("columns.cu", by_type("column_sums", x.dtype.name), x, (x,), (out,))

    def _slabs(self, file, name, x, arguments, outs):
        """Run a kernel that sums over slabs of the rows of x, then add its partial sums to outs."""
        columns = x.shape[-1]
        rows = x.size // max(1, columns)
        if x.size == 0:
            return
        slabs = min(ceil(rows / SLAB_THREADS), MOST_SLABS)
        partial = [self._xp.empty((slabs, columns), np.float32) for _ in outs]
        self._loader.launch(file, name, (ceil(columns / 32), slabs), (32, SLAB_THREADS),
                            (rows, columns, *arguments, *partial))
        for out, sums in zip(outs, partial, strict=True):
            self._loader.launch("columns.cu", by_type("add_slabs", out.dtype.name),
                                (ceil(columns / ROW_THREADS),), (ROW_THREADS,),
                                (slabs, columns, sums, self._in_place(out)))

    # LayerNorm, and RMSNorm, which has neither mean nor b.

    def layernorm_forward(self, x, w, b, eps):
        """Return (y, mean, rstd): y (..., D), mean and rstd (...) in float32."""
        y, mean, rstd = self._results(x, 2)
        self._rows("norm.cu", "layernorm_forward", x, self._whole(x), w, b, float(eps), y, mean,
                   rstd)
        return y, mean, rstd

    def layernorm_backward_input(self, dy, x, w, mean, rstd):
        """Return dx (..., D)."""
        dx = self._xp.empty(x.shape, x.dtype)
        self._rows("norm.cu", "layernorm_backward", x, self._whole(dy), self._whole(x), w, mean,
                   rstd, dx)
        return dx

    def layernorm_backward_weight(self, dy, x, mean, rstd, dw, db):
        """Add the sum of dy xhat to dw (D,) and the sum of dy to db (D,)."""
        arguments = (self._whole(dy), self._whole(x), mean, rstd)
        self._slabs("norm.cu", by_type("layernorm_slabs", x.dtype.name), x, arguments, (dw, db))

    def rmsnorm_forward(self, x, w, eps):
        """Return (y, rstd): y (..., D), rstd (...) in float32."""
        y, rstd = self._results(x, 1)
        self._rows("norm.cu", "rmsnorm_forward", x, self._whole(x), w, float(eps), y, rstd)
        return y, rstd

    def rmsnorm_backward_input(self, dy, x, w, rstd):
        """Return dx (..., D)."""
        dx = self._xp.empty(x.shape, x.dtype)
        self._rows("norm.cu", "rmsnorm_backward", x, self._whole(dy), self._whole(x), w, rstd, dx)
        return dx

    def rmsnorm_backward_weight(self, dy, x, rstd, dw):
        """Add the sum of dy x rstd to dw (D,)."""
        arguments = (self._whole(dy), self._whole(x), rstd)
        self._slabs("norm.cu", by_type("rmsnorm_slabs", x.dtype.name), x, arguments, (dw,))

    def _results(self, x, statistics):
        """Return empty arrays: one like x (..., D), and as many (...) in float32."""
        return (self._xp.empty(x.shape, x.dtype),
                *(self._xp.empty(x.shape[:-1], np.float32) for _ in range(statistics)))

    # Cross-entropy over a vocabulary shard.

    def cross_entropy_stats(self, logits, valid, targets, start):
        """Return (N, 3) float32: maximum, sum of exp(logit - maximum), logit of the target or 0.

        logits (N, V), of which `valid` columns count; targets (N,) int64; start: id of column 0.
        """
        stats = self._xp.empty((logits.shape[0], 3), np.float32)
        self._rows("cross_entropy.cu", "cross_entropy_stats", logits, valid,
                   self._in_place(logits), self._ids(targets), np.int64(start), stats)
        return stats

    def cross_entropy_backward(self, logits, valid, targets, lse, start, scale):
        """Write (softmax - onehot) scale over logits (N, V), 0 from column `valid` on."""
        self._rows("cross_entropy.cu", "cross_entropy_backward", logits, valid,
                   self._in_place(logits), self._ids(targets), self._whole(lse), np.int64(start),
                   float(scale))

    # Softmax of attention's scores.

    def causal_softmax_forward(self, scores, q_pos, k_pos, factor):
        """Write softmax of factor scores (..., Tq, Tk) over the visible keys over scores."""
        self._rows("softmax.cu", "causal_softmax_forward", scores, len(q_pos), self._ids(q_pos),
                   self._ids(k_pos), float(factor), self._in_place(scores))

    def causal_softmax_backward(self, probs, dprobs, factor):
        """Write the gradient of the scores (..., Tq, Tk) over dprobs."""
        assert probs.dtype == dprobs.dtype, (probs.dtype, dprobs.dtype)
        self._rows("softmax.cu", "causal_softmax_backward", probs, float(factor),
                   self._whole(probs), self._in_place(dprobs))

    # Updates.

    def adamw_runs(
        self, data, grad, m, v, runs, *, lr, beta1, beta2, eps, weight_decay, step, copy=None
    ):
        """Update the flat float32 buffers data, m, v in one launch; step counts from 1.

        runs: (whether its weights decay, slice) of each part, a row of the grid for each. copy: a
        flat buffer of 16 bits that gets the new data too.
        """
        buffers = [self._in_place(x) for x in (data, grad, m, v)]
        assert {(x.dtype.name, x.shape) for x in buffers} == {("float32", data.shape)}, data.dtype
        if not runs:
            return
        table = np.array([(run.start, run.stop, decays) for decays, run in runs], np.int64)
        longest = int((table[:, 1] - table[:, 0]).max())
        blocks = min(ceil(longest / ELEMENT_THREADS), MOST_BLOCKS_OF_RUN)
        numbers = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, 1.0 - lr * weight_decay,
                   lr / (1.0 - beta1**step), (1.0 - beta2**step) ** -0.5, eps)
        name = "adamw" if copy is None else by_type("adamw_with_copy", copy.dtype.name)
        copies = () if copy is None else (self._in_place(copy),)
        self._loader.launch(
            "adamw.cu", name, (blocks, len(runs)), (ELEMENT_THREADS,),
            (self._xp.asarray(table), *buffers, *map(float, numbers), *copies))

    # What a kernel can take.

    def _whole(self, x):
        """Return x, or a copy if there are gaps between its elements."""
        return self._xp.ascontiguousarray(x)

    def _ids(self, x):
        assert x.dtype == np.int64, x.dtype
        return self._whole(x)

    @staticmethod
    def _in_place(x):
        assert x.flags.c_contiguous, (x.shape, x.strides)
        return x
