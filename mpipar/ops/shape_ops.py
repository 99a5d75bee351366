"""The array functions on shapes only: no numbers, but FLOPs, bytes and live memory.

The real engine and the real layers run on these, so the cost model is the code itself. Every
function allocates what that of `NumpyOps` allocates. Buffers that `NumpyOps` keeps between calls
are counted as *scratch*, on request. The table of `functions` determines shapes and types of
results.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cuda.attention import parts_shape
from mpipar.ops.functions import EPILOGUES, Ops
from mpipar.ops.numpy_attention import GAP, QUERY_TILE, part_sizes
from mpipar.ops.numpy_ops import PRODUCT_TILE
from mpipar.ops.signature import DIMS, Array, Function, Part, Shape, answer, shape_of

MEMORY_LABELS = ("weights", "gradients", "optimizer", "stash", "buffers")


def labels_of(peaks: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return MEMORY_LABELS and any further labels of {label: bytes} dicts, such as `snapshot`."""
    return (*MEMORY_LABELS, *sorted({*chain(*peaks)} - {*MEMORY_LABELS}))


class Ledger:
    """Live bytes by label, and the breakdown at the instant of the largest total."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.total = 0
        self.peak_total = 0

    def add(self, label: str, nbytes: int) -> None:
        """Count nbytes more (or, if negative, fewer) under the label."""
        self.live[label] += nbytes
        self.total += nbytes
        if self.total > self.peak_total:
            self.reset_peak()

    def reset_peak(self) -> None:
        """Restart the search for the largest total, from what is alive now."""
        self.peak_total = self.total
        self.peak = {name: size for name, size in self.live.items() if size}


class _Block:
    """One allocation. Every view holds a reference, which keeps its bytes alive."""

    __slots__ = ("label", "ledger", "nbytes")

    def __init__(self, ledger: Ledger, label: str, nbytes: int) -> None:
        self.ledger, self.label, self.nbytes = ledger, label, nbytes
        ledger.add(label, nbytes)

    def __del__(self) -> None:
        self.ledger.add(self.label, -self.nbytes)


class ShapeArray:
    """An array with a shape and a type; slicing, transposing and reshaping follow NumPy.

    Strides (in elements) are kept, because a reshape that NumPy does by copying must allocate.
    """

    __slots__ = ("_block", "dtype", "shape", "strides")

    def __init__(self, block: _Block, shape: Shape, dtype: np.dtype, strides: Shape) -> None:
        self._block, self.shape, self.dtype, self.strides = block, shape, dtype, strides

    @classmethod
    def allocate(cls, ledger: Ledger, shape: Shape, dtype: DTypeLike, label: str) -> Any:
        """Return a new C-contiguous one, as an Array; its bytes are counted under the label."""
        shape, dtype = tuple(operator.index(n) for n in shape), np.dtype(dtype)
        assert all(n >= 0 for n in shape), shape
        block = _Block(ledger, label, math.prod(shape) * dtype.itemsize)
        return cls(block, shape, dtype, _c_strides(shape))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements are in C order without gaps."""
        expected = _c_strides(self.shape)
        return self.size == 0 or all(
            n == 1 or have == want
            for n, have, want in zip(self.shape, self.strides, expected, strict=True)
        )

    @property
    def flags(self) -> SimpleNamespace:
        """What a Comm asks of an array."""
        return SimpleNamespace(c_contiguous=self.contiguous)

    @property
    def T(self) -> ShapeArray:
        """The array with its dimensions reversed."""
        return self.transpose()

    def __len__(self) -> int:
        assert self.shape, "len() of an array without dimensions"
        return self.shape[0]

    def _view(self, shape: Iterable[int], strides: Iterable[int]) -> ShapeArray:
        return ShapeArray(self._block, tuple(shape), self.dtype, tuple(strides))

    def astype(self, dtype: DTypeLike) -> ShapeArray:
        """Return a new array of another type; a wider one is a buffer for one computation."""
        label = "buffers" if np.dtype(dtype).itemsize > self.itemsize else self._block.label
        return ShapeArray.allocate(self._block.ledger, self.shape, dtype, label)

    def view(self, dtype: DTypeLike) -> ShapeArray:
        """Return the array itself: its memory as another type of the same width."""
        assert np.dtype(dtype).itemsize == self.itemsize, (dtype, self.dtype)
        return self

    def reshape(self, *shape: Any) -> ShapeArray:
        """Return a view in another shape, or a new array where NumPy would have to copy."""
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if -1 in shape:
            known = -math.prod(shape)
            filled = self.size // known if known else 0
            shape = tuple(filled if n == -1 else n for n in shape)
        assert math.prod(shape) == self.size, (shape, self.shape)
        if self.contiguous:
            return self._view(shape, _c_strides(shape))
        return ShapeArray.allocate(self._block.ledger, shape, self.dtype, self._block.label)

    def transpose(self, *axes: Any) -> ShapeArray:
        """Return a view with its dimensions in a different order (reversed by default)."""
        if len(axes) == 1 and isinstance(axes[0], tuple | list):
            axes = tuple(axes[0])
        axes = axes or tuple(range(self.ndim))[::-1]
        axes = tuple(axis % self.ndim for axis in axes)
        assert sorted(axes) == list(range(self.ndim)), (axes, self.shape)
        return self._view((self.shape[a] for a in axes), (self.strides[a] for a in axes))

    def __getitem__(self, index: Any) -> ShapeArray:
        """Return the view that integers, slices, None and Ellipsis select."""
        items = index if isinstance(index, tuple) else (index,)
        left = self.ndim - sum(item is not None and item is not Ellipsis for item in items)
        assert left >= 0, (index, self.shape)
        at = items.index(Ellipsis) if Ellipsis in items else len(items)
        axes, shape, strides = zip(self.shape, self.strides, strict=True), [], []
        for item in (*items[:at], *[slice(None)] * left, *items[at + 1 :]):
            length, stride = (1, 0) if item is None else next(axes)
            if isinstance(item, slice):
                start, stop, step = item.indices(length)
                length, stride = len(range(start, stop, step)), stride * step
            elif item is not None:
                assert -length <= operator.index(item) < length, (index, self.shape)
                continue
            shape.append(length)
            strides.append(stride)
        return self._view(shape, strides)


def _c_strides(shape: Shape) -> Shape:
    """Return the strides in elements of a C-contiguous array."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


class Recording(Protocol):
    """Who says in which phase a product runs: the recorder of a step."""

    @property
    def phase(self) -> str: ...


# Buffers that `NumpyOps` keeps for a part of attention, by function.
BUFFERS = {
    "attention_forward": ("queries", "keys", "values"),
    "attention_backward_input": ("queries", "dy", "keys", "values", "scores", "dk", "dv", "dq"),
    "attention_block_forward": ("queries", "keys", "values", "scores"),
    "attention_block_backward": (
        *("queries", "dy", "keys", "values", "scores", "dk", "dv", "dq"),
        *("turned keys", "probs"),
    ),
}


class ShapeOps(Ops):
    """The array functions on `ShapeArray`.

    flops: phase -> FLOPs of products (2 M K N each).
    live: label -> bytes alive now.
    peak: label -> bytes alive when their sum was largest.
    like: the class of array functions whose bytes are counted. keeps_scratch: whether these are
    those of `NumpyOps`, which keeps buffers of its own.
    """

    def __init__(
        self,
        dtype: DTypeLike,
        recorder: Recording | None = None,
        like: type[ArrayOps] = ArrayOps,
        keeps_scratch: bool = False,
    ) -> None:
        self.takes_16_bits, self.tiled_head_width = like.takes_16_bits, like.tiled_head_width
        self.table_multiple = like.table_multiple
        self.xp = ModuleType("shapes")  # which computes nothing
        self.dtype = self.accum_dtype = np.dtype(dtype)
        self.device = "shapes"
        self.worst_case = False  # whether the experts of this rank get as many rows as possible
        self.recorder = recorder
        self.flops: Counter[str] = Counter()
        self._ledger = Ledger()
        self.reset_peak = self._ledger.reset_peak
        self._scratch: dict[str, Array] | None = {} if keeps_scratch else None

    @property
    def live(self) -> dict[str, int]:
        """Label -> bytes of the arrays that are alive now."""
        return {label: size for label, size in self._ledger.live.items() if size}

    @property
    def peak(self) -> dict[str, int]:
        """Label -> bytes alive at the instant at which their sum was largest."""
        return dict(self._ledger.peak)

    def _count(self, flops: int) -> None:
        self.flops["" if self.recorder is None else self.recorder.phase] += flops

    # Memory.

    def empty(self, shape: Shape, dtype: DTypeLike | None = None, label: str = "stash") -> Array:
        """Return a new array, its bytes counted under the label until its last view is gone."""
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        return ShapeArray.allocate(
            self._ledger, shape, self.dtype if dtype is None else dtype, label
        )

    zeros = empty  # nothing is written

    def asarray(self, host: np.ndarray) -> Array:
        """Return an array with a host array's shape and type; a ShapeArray is returned as it is."""
        return host if isinstance(host, ShapeArray) else self.empty(host.shape, host.dtype)

    def to_host(self, x: Array) -> np.ndarray:
        """Return a NumPy array of zeros in the shape of x."""
        return np.zeros(x.shape, x.dtype)

    def to_floats(self, xs: Sequence[Any]) -> list[float]:
        """Return a zero for each number."""
        return [0.0 for _ in xs]

    def counts_to_host(
        self, counts: Array, total: int, most: Shape = (), own: slice | None = None
    ) -> list[int]:
        """Return as many numbers as counts has; they differ by one at most, and their sum is total.

        In the worst case those in `own` add up to the product of `most`, and the others are 0.
        """
        found = [0] * counts.size
        worst = bool(most) and self.worst_case
        places = range(counts.size)[(worst and own) or slice(None)]
        total, parts = math.prod(most) if worst else total, len(places)
        for part, place in enumerate(places):
            found[place] = total * (part + 1) // parts - total * part // parts
        return found

    def block_order(self, blocks: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """Return two new arrays with a number for each row."""
        rows = sum(map(sum, blocks))
        return self.empty((rows,), np.int64), self.empty((rows,), np.int64)

    # These concern only the host.
    pinned, synchronize, timestamp, nanoseconds = (
        ArrayOps.pinned,
        ArrayOps.synchronize,
        ArrayOps.timestamp,
        ArrayOps.nanoseconds,
    )

    # All functions that have no method here.

    def _lend(self, name: str, size: int) -> None:
        """Count the buffer of this name as `NumpyOps._buffer` keeps it: its largest size so far."""
        if self._scratch is not None and size > getattr(self._scratch.get(name), "size", 0):
            self._scratch[name] = self.empty((size,), label="scratch")

    def copy(self, dst: Array, src: Array) -> None:
        """Copy nothing; as shapes' most frequent function it has a short way."""
        assert dst.shape == src.shape, (dst.shape, src.shape)

    def matmul_tn_add(self, x: Array, y: Array, out: Array) -> None:
        """Add a product to out, through a buffer for a block of its rows."""
        rows, columns = out.shape if out.strides[0] >= out.strides[1] else out.shape[::-1]
        self._lend("product", columns * min(rows, max(64, PRODUCT_TILE // max(1, columns))))
        super().matmul_tn_add(x, y, out)

    def _call(self, function: Function, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Count the FLOPs and bytes of a function, and return what it returns."""
        if function.name in EPILOGUES and function.name not in self.takes_16_bits:
            return getattr(ArrayOps, function.name)(self, *arguments, **named)  # one after another
        given = function.bind(arguments, named)
        sizes = function.sizes(given)
        if function.flops:
            self._count(math.prod(shape_of(DIMS.findall(function.flops), sizes)))
        held = function.name in BUFFERS and self._lend_attention(
            function.name, given["q"], given["k"]
        )
        real = [x.dtype for _, x in function.arrays(given) if x.dtype.kind not in "iu"]
        if isinstance(given.get("out"), tuple):  # arrays for all results
            given |= zip((part.name for part in function.gives), given["out"], strict=True)
        results = [self._result(part, sizes, given, real) for part in function.gives]
        del held
        return answer(results)

    def _result(
        self, part: Part, sizes: Mapping[str, Any], given: Mapping[str, Any], real: list[np.dtype]
    ) -> Any:
        """Return one result; real: types of the arguments that are real numbers."""
        if part.kind == "host":
            return 0.0
        shape, own = shape_of(part.dims or (), sizes), given.get(part.name)
        if own is not None:
            assert part.dims is None or own.shape == shape, (part.name, own.shape, shape)
            return own
        dtype = {"": (*real, None)[0], "sum": self.accum_dtype}.get(part.kind, part.kind)
        return self.empty(shape, dtype)

    def attention_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Any]:
        """Return (y (B, Tq, H, d), probs (B, H, Tq, Tk) or, in tiles, (y, stats))."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_forward(q, k, v, q_pos, k_pos)
        self._count(2 * 2 * q.size * k.shape[1])
        y = self.empty(q.shape, q.dtype)
        return y, (y, self.empty((len(q), q.shape[2], q.shape[1], 2), self.accum_dtype))

    def _lend_attention(self, name: str, q: Array, k: Array) -> Array | None:
        """Count the buffers of attention for a part: see `NumpyOps`; return what a GPU releases."""
        (batch, queries, heads, width), (_, keys, kv_heads, _) = q.shape, k.shape
        assert heads % kv_heads == 0, (heads, kv_heads)
        rows, own_heads = part_sizes(batch, queries, heads, keys, kv_heads)
        group, tile, backward = heads // kv_heads, min(queries, QUERY_TILE), "backward" in name
        turned = ("turned keys", "values" if backward else "keys")
        sizes = dict.fromkeys(turned, (keys + GAP) * width) | {  # all others: keys * width
            "queries": group * queries * width,
            "dy": group * queries * width,
            "dq": group * tile * width,
            "scores": group * tile * keys,
            "probs": group * tile * keys,
        }
        one_product = queries == tile and group == 1  # computes all of dk and of dv
        for buffer in (*BUFFERS[name], *(["part"] if backward and not one_product else [])):
            self._lend(buffer, rows * own_heads * sizes.get(buffer, keys * width))
        if backward and width <= self.tiled_head_width:
            return self.empty(parts_shape(q, k), np.float32, "buffers")
        return None
