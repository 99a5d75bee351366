"""An array without numbers: shape, type, strides, and a ledger of live bytes."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.ops.signature import Shape

MEMORY_LABELS = ("weights", "gradients", "optimizer", "stash", "buffers")


def labels_of(peaks: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return MEMORY_LABELS and any further labels of {label: bytes} dicts, such as `snapshot`."""
    further = {label for peak in peaks for label in peak} - {*MEMORY_LABELS}
    return (*MEMORY_LABELS, *sorted(further))


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

    __slots__ = ("_ledger", "label", "nbytes")

    def __init__(self, ledger: Ledger, label: str, nbytes: int) -> None:
        self._ledger, self.label, self.nbytes = ledger, label, nbytes
        ledger.add(label, nbytes)

    def __del__(self) -> None:
        self._ledger.add(self.label, -self.nbytes)


class ShapeArray:
    """An array with a shape and a type; slicing, transposing and reshaping follow NumPy.

    Strides (in elements) are kept, because a reshape that NumPy does by copying must allocate.
    """

    __slots__ = ("_block", "_ledger", "dtype", "shape", "strides")

    def __init__(
        self, ledger: Ledger, block: _Block, shape: Shape, dtype: np.dtype, strides: Shape
    ) -> None:
        self._ledger, self._block = ledger, block
        self.shape, self.dtype, self.strides = shape, dtype, strides

    @classmethod
    def allocate(cls, ledger: Ledger, shape: Shape, dtype: DTypeLike, label: str) -> ShapeArray:
        """Return a new C-contiguous array whose bytes are counted under the label."""
        shape, dtype = tuple(operator.index(n) for n in shape), np.dtype(dtype)
        assert all(n >= 0 for n in shape), shape
        block = _Block(ledger, label, math.prod(shape) * dtype.itemsize)
        return cls(ledger, block, shape, dtype, _c_strides(shape))

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

    def __repr__(self) -> str:
        return f"ShapeArray({self.shape}, {self.dtype.name}, {self._block.label!r})"

    def _view(self, shape: Iterable[int], strides: Iterable[int]) -> ShapeArray:
        return ShapeArray(self._ledger, self._block, tuple(shape), self.dtype, tuple(strides))

    def astype(self, dtype: DTypeLike) -> ShapeArray:
        """Return a new array of another type; a wider one is a buffer for one computation."""
        wider = np.dtype(dtype).itemsize > self.itemsize
        label = "buffers" if wider else self._block.label
        return ShapeArray.allocate(self._ledger, self.shape, dtype, label)

    def view(self, dtype: DTypeLike) -> ShapeArray:
        """Return the array itself: its memory as another type of the same width."""
        assert np.dtype(dtype).itemsize == self.itemsize, (dtype, self.dtype)
        return self

    def sum(self, axis: int) -> ShapeArray:
        """Return a new array without the first dimension."""
        assert axis == 0, axis
        return ShapeArray.allocate(self._ledger, self.shape[1:], self.dtype, self._block.label)

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
        return ShapeArray.allocate(self._ledger, shape, self.dtype, self._block.label)

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
        shape, strides, axis = [], [], 0
        for place, item in enumerate(items):
            assert axis < len(self.shape) or item in (None, Ellipsis), (index, self.shape)
            if isinstance(item, slice):
                start, stop, step = item.indices(self.shape[axis])
                shape.append(len(range(start, stop, step)))
                strides.append(self.strides[axis] * step)
                axis += 1
            elif item is None:
                shape.append(1)
                strides.append(0)
            elif item is Ellipsis:
                left = self.ndim - sum(one is not None for one in items[place + 1 :])
                assert left >= axis, (index, self.shape)
                shape += self.shape[axis:left]
                strides += self.strides[axis:left]
                axis = left
            else:
                length = self.shape[axis]
                assert -length <= operator.index(item) < length, (index, self.shape)
                axis += 1
        return self._view((*shape, *self.shape[axis:]), (*strides, *self.strides[axis:]))


def _c_strides(shape: Shape) -> Shape:
    """Return the strides in elements of a C-contiguous array."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
