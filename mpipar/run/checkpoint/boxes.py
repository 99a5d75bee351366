"""Boxes: which part of a full tensor a rank holds, and which rows of it the rank writes.

A box is one (first, stop) pair per axis of the logical shape, without padding. It thus means the
same on every layout, and a reader asks for boxes without knowing who wrote them. All functions are
pure.
"""

from __future__ import annotations

import math

from mpipar.comm.grid import chunk_slice
from mpipar.layers.param import Box

BLOCK_BYTES = 16 * 2**20  # a block of rows: the most that one message or one write carries


def whole_box(shape) -> Box:
    """Return the box that covers a whole tensor."""
    return tuple((0, length) for length in shape)


def boxes_of_run(shape, first: int, stop: int) -> list[Box]:
    """Return the boxes of elements [first, stop) of a flattened array, ascending, each contiguous.

    They are the whole rows, what precedes them, and what follows; at most 2 * axes - 1 boxes.
    """
    if len(shape) == 1 or first == stop:
        return [((first, stop), *((0, length) for length in shape[1:]))] if first < stop else []
    row = math.prod(shape[1:])
    low, high = -(-first // row), stop // row  # the whole rows
    if low > high:
        return _in_row(shape, low - 1, first, stop)
    rows = [((low, high), *((0, length) for length in shape[1:]))] if low < high else []
    return [
        *_in_row(shape, low - 1, first, low * row),
        *rows,
        *_in_row(shape, high, high * row, stop),
    ]


def _in_row(shape, row: int, first: int, stop: int) -> list[Box]:
    """Return `boxes_of_run` of a run within one row."""
    start = row * math.prod(shape[1:])
    return [((row, row + 1), *box) for box in boxes_of_run(shape[1:], first - start, stop - start)]


def boxes_in(flat, buffer: str):
    """Yield (Param, box, array) of all that a buffer holds, without the padding of cut axes."""
    for param, first, values in flat.parts_in(buffer):
        held, done = param.box, 0
        for local in boxes_of_run(param.local_shape, first, first + values.size):
            x = values[done : done + volume(local)].reshape(shape_of(local))
            done += x.size
            place = tuple(
                (low + start, high + start)
                for (low, high), (start, _) in zip(local, held, strict=True)
            )
            if (box := overlap(place, held)) is not None:
                yield param, box, x[within(box, place)]


def share_of_rows(box: Box, index: int, count: int) -> Box:
    """Return the rows of a box that replica `index` of `count` writes, perhaps none."""
    (first, stop), *others = box
    rows = chunk_slice(stop - first, count, index)
    return ((first + rows.start, first + rows.stop), *others)


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - first for first, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the lengths of a box's axes."""
    return tuple(stop - first for first, stop in box)


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(first < stop for first, stop in shared) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the place of a box in an array that holds the box `outer`, as slices."""
    return tuple(
        slice(first - start, stop - start)
        for (first, stop), (start, _) in zip(box, outer, strict=True)
    )


def row_blocks(box: Box, itemsize: int):
    """Yield a box in blocks of whole rows, each of at most BLOCK_BYTES or a single row."""
    (first, stop), *others = box
    rows = max(1, BLOCK_BYTES // max(1, volume(tuple(others)) * itemsize))
    for start in range(first, stop, rows):
        yield ((start, min(start + rows, stop)), *others)
