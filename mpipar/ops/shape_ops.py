"""The array functions on shapes only: no numbers, but FLOPs, bytes and live memory.

The real engine and the real layers run on these, so the cost model is the code itself. Every
function allocates what the one of `NumpyOps` allocates. Buffers that `NumpyOps` keeps between calls
count as *scratch*, on request. The table of `functions` gives the shapes and types of results.
"""

from collections import Counter

import numpy as np

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.functions import FUNCTIONS, flops, shape_of
from mpipar.ops.image_ops import IMAGE_SIZES
from mpipar.ops.numpy_ops import PRODUCT_TILE
from mpipar.ops.shape_array import Ledger, ShapeArray
from mpipar.ops.shape_attention import ShapeAttention


class ShapeOps(ShapeAttention):
    """The array functions on `ShapeArray`.

    flops: phase -> FLOPs of products (2 M K N each).
    live: label -> bytes alive now.
    peak: label -> bytes alive when their sum was largest.
    like: the class of array functions whose bytes are counted. keeps_scratch: whether these are
    those of `NumpyOps`, with buffers of their own.
    """

    def __init__(self, dtype, recorder=None, like=ArrayOps, keeps_scratch=False):
        self.takes_16_bits, self.tiled_head_width = like.takes_16_bits, like.tiled_head_width
        self.xp = None
        self.dtype = self.statistics = np.dtype(dtype)
        self.device = "shapes"
        self.recorder = recorder
        self.flops = Counter()
        self._ledger = Ledger()
        self._scratch = {} if keeps_scratch else None

    @property
    def live(self):
        """Label -> bytes of the arrays that are alive now."""
        return {label: size for label, size in self._ledger.live.items() if size}

    @property
    def peak(self):
        """Label -> bytes alive at the instant at which their sum was largest."""
        return dict(self._ledger.peak)

    def reset_peak(self):
        """Start a new search for the largest sum, from what is alive now."""
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

    def pinned(self, shape, dtype):
        """Return an uninitialised host array."""
        return np.empty(shape, dtype)

    def to_pinned(self, x):
        """Return a NumPy array of zeros in the shape of x."""
        return self.to_host(x)

    def synchronize(self):
        """Do nothing."""

    def _lend(self, name, size):
        """Count the buffer of this name as `NumpyOps._buffer` keeps it: its largest size yet."""
        if self._scratch is not None and size > getattr(self._scratch.get(name), "size", 0):
            self._scratch[name] = self.empty((size,), label="scratch")

    def matmul_tn_add(self, x, y, out):
        """Add a product to out, by way of a buffer for a block of its rows."""
        rows, columns = out.shape if out.strides[0] >= out.strides[1] else out.shape[::-1]
        self._lend("product", columns * min(rows, max(64, PRODUCT_TILE // max(1, columns))))
        function = FUNCTIONS["matmul_tn_add"]
        return self._call(function, function.bind((x, y, out), {}))

    def _call(self, function, given):
        """Return what a function of the table returns; count its FLOPs and bytes."""
        sizes = function.sizes(given)
        more, scratch = IMAGE_SIZES.get(function.name, _no_image)(sizes, given)
        for letter, length in more.items():
            assert sizes.setdefault(letter, length) == length, (function.text, letter, sizes, more)
        if count := flops(function.name, sizes):
            self._count(count)
        held = [self.empty(shape) for shape in scratch]
        real = [x.dtype for _, x in function.arrays(given) if x.dtype.kind not in "iu"]
        results = tuple(self._result(part, sizes, given, real) for part in function.gives)
        del held
        return results if len(results) > 1 else results[0] if results else None

    def _result(self, part, sizes, given, real):
        """Return one result; real: types of the arguments that are real numbers."""
        if part.kind == "host":
            return 0.0
        if part.name in given:
            return given[part.name]
        dtype = {"": real[0], "sum": self.statistics}.get(part.kind, part.kind)
        return self.empty(shape_of(part.dims, sizes), dtype)


def _no_image(sizes, given):
    """Return (no more sizes, no scratch arrays)."""
    return {}, ()


def _counted(function):
    """Return the method that counts a function of the table."""
    def method(self, *arguments, **named):
        return self._call(function, function.bind(arguments, named))

    return method


for _name, _function in FUNCTIONS.items():
    if not hasattr(ShapeOps, _name):  # attention has functions of its own
        setattr(ShapeOps, _name, _counted(_function))
