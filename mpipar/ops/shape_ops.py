"""The array functions on shapes only: no numbers, but FLOPs, bytes and live memory.

The real engine and the real layers run on these, which makes the cost model the code itself. Every
function allocates what the one of `NumpyOps` allocates; its tile buffers, bounded by a constant,
are not counted. B T D H d V N as in `array_ops`.
"""

from collections import Counter

import numpy as np

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.shape_array import Ledger, ShapeArray
from mpipar.ops.shape_attention import ShapeAttention
from mpipar.ops.shape_image_ops import ShapeImageOps


class ShapeOps(ShapeAttention, ShapeImageOps):
    """The array functions on `ShapeArray`.

    flops: phase -> FLOPs of products (2 M K N each).
    live: label -> bytes alive now; peak: label -> bytes alive when their sum was largest.
    like: the class of array functions of which the bytes are to be counted.
    """

    def __init__(self, dtype, recorder=None, like=ArrayOps):
        self.takes_16_bits, self.tiled_head_width = like.takes_16_bits, like.tiled_head_width
        self.xp = None
        self.dtype = self.statistics = np.dtype(dtype)
        self.device = "shapes"
        self.recorder = recorder
        self.flops = Counter()
        self._ledger = Ledger()

    @property
    def live(self):
        """Label -> bytes of the arrays that are alive now."""
        return {label: size for label, size in self._ledger.live.items() if size}

    @property
    def peak(self):
        """Label -> bytes alive at the instant at which their sum was largest."""
        return dict(self._ledger.peak)

    def reset_peak(self):
        """Look for the largest sum anew, from what is alive now."""
        self._ledger.reset_peak()

    def _count(self, flops):
        phase = "" if self.recorder is None else self.recorder.phase
        self.flops[phase] += flops

    # Memory.

    def empty(self, shape, dtype=None, label="stash"):
        """Return a new array, its bytes counted under the label until its last view is gone."""
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        dtype = self.dtype if dtype is None else dtype
        return ShapeArray.allocate(self._ledger, shape, dtype, label)

    def zeros(self, shape, dtype=None, label="stash"):
        """Return a new array."""
        return self.empty(shape, dtype, label)

    def asarray(self, host):
        """Return an array of the shape and type of a host array; an own array passes through."""
        return host if isinstance(host, ShapeArray) else self.empty(host.shape, host.dtype)

    def to_host(self, x):
        """Return a NumPy array of zeros in the shape of x."""
        return np.zeros(x.shape, x.dtype)

    def synchronize(self):
        """Do nothing."""

    # Elementwise basics.

    def fill(self, x, value):
        """Do nothing: x keeps its shape."""

    def copy(self, dst, src):
        """Check that both have the same shape."""
        assert dst.shape == src.shape, (dst.shape, src.shape)

    def scale(self, x, factor):
        """Return x itself."""
        return x

    def accumulate(self, x, y):
        """Check the shapes and return x itself."""
        assert x.shape == y.shape, (x.shape, y.shape)
        return x

    def sum(self, x):
        """Return 0.0."""
        return 0.0

    def square_sum(self, x):
        """Return 0.0."""
        return 0.0

    # Products.

    def matmul(self, x, w):
        """(..., K) times (K, M) gives (..., M)."""
        assert x.shape[-1] == w.shape[0], (x.shape, w.shape)
        self._count(2 * x.size * w.shape[1])
        return self.empty((*x.shape[:-1], w.shape[1]), x.dtype)

    def matmul_nt(self, x, w):
        """(..., M) and (K, M) give (..., K)."""
        assert x.shape[-1] == w.shape[1], (x.shape, w.shape)
        self._count(2 * x.size * w.shape[0])
        return self.empty((*x.shape[:-1], w.shape[0]), x.dtype)

    def matmul_tn_add(self, x, y, out):
        """(..., K) and (..., M) are added to (K, M)."""
        assert x.shape[:-1] == y.shape[:-1], (x.shape, y.shape)
        assert out.shape == (x.shape[-1], y.shape[-1]), (out.shape, x.shape, y.shape)
        self._count(2 * x.size * y.shape[-1])

    def bias_forward(self, y, b):
        """Return y itself."""
        assert y.shape[-1:] == b.shape, (y.shape, b.shape)
        return y

    def bias_backward_weight(self, dy, db):
        """Check the shapes."""
        assert dy.shape[-1:] == db.shape, (dy.shape, db.shape)

    # GELU and norms.

    def gelu_forward(self, x):
        """Return a new array shaped like x."""
        return self.empty(x.shape, x.dtype)

    def bias_gelu_forward(self, x, b):
        """Return a new array shaped like x."""
        return self.gelu_forward(self.bias_forward(x, b))

    def gelu_backward_input(self, dy, x):
        """Return a new array shaped like x."""
        assert dy.shape == x.shape, (dy.shape, x.shape)
        return self.empty(x.shape, x.dtype)

    def rmsnorm_forward(self, x, w, eps):
        """Return (y, rstd)."""
        assert x.shape[-1:] == w.shape, (x.shape, w.shape)
        return self.empty(x.shape, x.dtype), self.empty(x.shape[:-1])

    def rmsnorm_backward_input(self, dy, x, w, rstd):
        """Return dx."""
        _check_norm(dy, x, rstd)
        assert x.shape[-1:] == w.shape, (x.shape, w.shape)
        return self.empty(x.shape, x.dtype)

    def rmsnorm_backward_weight(self, dy, x, rstd, dw):
        """Check the shapes."""
        _check_norm(dy, x, rstd)
        assert x.shape[-1:] == dw.shape, (x.shape, dw.shape)

    def layernorm_forward(self, x, w, b, eps):
        """Return (y, mean, rstd)."""
        assert x.shape[-1:] == w.shape == b.shape, (x.shape, w.shape, b.shape)
        return self.empty(x.shape, x.dtype), self.empty(x.shape[:-1]), self.empty(x.shape[:-1])

    def layernorm_backward_input(self, dy, x, w, mean, rstd):
        """Return dx."""
        _check_norm(dy, x, mean, rstd)
        assert x.shape[-1:] == w.shape, (x.shape, w.shape)
        return self.empty(x.shape, x.dtype)

    def layernorm_backward_weight(self, dy, x, mean, rstd, dw, db):
        """Check the shapes."""
        _check_norm(dy, x, mean, rstd)
        assert x.shape[-1:] == dw.shape == db.shape, (x.shape, dw.shape, db.shape)

    # Embeddings.

    def embedding_forward(self, ids, table, start):
        """Return (..., D)."""
        return self.empty((*ids.shape, table.shape[1]), table.dtype)

    def embedding_backward_weight(self, ids, dy, dtable, start):
        """Check the shapes."""
        assert dy.shape == (*ids.shape, dtable.shape[1]), (dy.shape, ids.shape, dtable.shape)

    def position_forward(self, x, positions, table):
        """Return a new array shaped like x (B, T, D)."""
        assert x.shape[1:] == (*positions.shape, table.shape[1]), (x.shape, positions.shape)
        return self.empty(x.shape)

    def position_backward_weight(self, positions, dy, dtable):
        """Check the shapes."""
        assert dy.shape[1:] == (*positions.shape, dtable.shape[1]), (dy.shape, positions.shape)

    # Loss over a vocabulary shard.

    def cross_entropy_forward(self, logits, targets, start, num_valid):
        """Return stats (N, 3)."""
        assert logits.shape[:1] == targets.shape, (logits.shape, targets.shape)
        return self.empty((logits.shape[0], 3))

    def cross_entropy_combine(self, stats):
        """Return (loss (N,), lse (N,))."""
        assert stats.shape[2:] == (3,), stats.shape
        return self.empty(stats.shape[1:2]), self.empty(stats.shape[1:2])

    def cross_entropy_backward_input(self, logits, targets, lse, start, num_valid, scale):
        """Return logits itself."""
        assert logits.shape[:1] == targets.shape == lse.shape, (logits.shape, targets.shape)
        return logits

    def argmax_forward(self, logits, start, num_valid, noise=None):
        """Return (N, 2) float64."""
        assert noise is None or noise.shape == logits.shape, (noise.shape, logits.shape)
        return self.empty((logits.shape[0], 2), np.float64)

    # Updates of flat buffers.

    def sgd_step(self, data, grad, lr):
        """Check the shapes."""
        assert data.shape == grad.shape, (data.shape, grad.shape)

    def adamw_step(
        self, data, grad, m, v, lr, beta1, beta2, eps, weight_decay, step, copy=None
    ):
        """Check the shapes."""
        shapes = [x.shape for x in (data, grad, m, v, copy) if x is not None]
        assert len(set(shapes)) == 1, shapes


def _check_norm(dy, x, *statistics):
    assert dy.shape == x.shape, (dy.shape, x.shape)
    assert {one.shape for one in statistics} == {x.shape[:-1]}, (statistics, x.shape)
