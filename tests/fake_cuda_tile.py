"""The tile model on NumPy, to the extent that kernels written for the package cuda-tile need it.

Blocks run one after another. A load without padding reads NaN outside an array, and a tile that
lies wholly outside is refused: both are undefined on a GPU.
"""

import itertools
from types import SimpleNamespace

import numpy as np
from fake_cupy import on_host, stream

float32, int32 = np.float32, np.int32
reshape, maximum, where, exp2, log2 = np.reshape, np.maximum, np.where, np.exp2, np.log2
arange = np.arange
max, min, sum, transpose = np.max, np.min, np.sum, np.transpose  # noqa: A001 - as the package
PaddingMode = SimpleNamespace(ZERO=0.0, UNDETERMINED=np.nan)
block = [0, 0, 0]


class Constant:
    def __class_getitem__(cls, kind):
        return kind


def kernel(function):
    return function


def launch(on, grid, function, arguments):
    assert on is stream
    assert all(grid), "CUDA starts no grid without blocks"
    arguments = on_host(arguments)
    for one in itertools.product(*map(range, grid)):
        block[: len(one)] = one
        with np.errstate(divide="ignore", invalid="ignore"):  # rows outside an array may see no key
            function(*arguments)
    stream.busy = True


def bid(axis):
    return block[axis]


def num_tiles(array, axis, shape):
    return -(-array.shape[axis] // shape[axis])


def full(shape, value, dtype):
    assert all(n & (n - 1) == 0 for n in shape), f"{shape}: sizes of tiles are powers of two"
    return np.full(shape, value, dtype)


def place(array, index, shape):
    """The part of an array that a tile covers."""
    starts = [i * n for i, n in zip(index, shape, strict=True)]
    assert all(start < n for start, n in zip(starts, array.shape, strict=True)), "wholly outside"
    return tuple(slice(start, start + n) for start, n in zip(starts, shape, strict=True))


def load(array, index, shape, padding_mode=PaddingMode.UNDETERMINED):
    tile = full(shape, padding_mode, array.dtype)
    found = array[place(array, index, shape)]
    tile[tuple(map(slice, found.shape))] = found
    return tile


def store(array, index, tile):
    assert tile.dtype == array.dtype
    to = place(array, index, tile.shape)
    array[to] = tile[tuple(map(slice, array[to].shape))]


def mma(x, y, acc):
    assert x.dtype == y.dtype, (x.dtype, y.dtype)
    return (acc + x.astype(acc.dtype) @ y.astype(acc.dtype)).astype(acc.dtype)


def astype(x, dtype):
    return x.astype(dtype)
