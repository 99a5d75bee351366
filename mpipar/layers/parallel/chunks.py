"""Equal chunks of an axis of any length, one for each rank of a group.

If q does not divide the length, every chunk has ceil(length/q) entries, and the last ones are
padded with zeros; some may hold nothing but padding. Padding stays zero and is dropped when the
chunks are joined.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size, chunk_slice
from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Dtype


def local_chunk(ops: Ops, x: Array, axis: int, comm: Comm) -> Array:
    """Return this rank's chunk of x along an axis: a view, or a copy if it needs padding."""
    length = x.shape[axis]
    return pad(
        ops,
        _part(x, axis, chunk_slice(length, comm.size, comm.group_rank)),
        axis,
        chunk_size(length, comm.size),
    )


def pad(ops: Ops, x: Array, axis: int, length: int) -> Array:
    """Return x, padded with zeros to `length` along an axis; x itself if it is long enough."""
    if x.shape[axis] == length:
        return x
    shape = list(x.shape)
    shape[axis] = length
    y = ops.zeros(tuple(shape), x.dtype, label="buffers")
    ops.copy(_part(y, axis, slice(x.shape[axis])), x)
    return y


def join(ops: Ops, pieces: Array, axis: int, length: int) -> Array:
    """Return the whole array, `length` long on an axis, from the chunks (q, ...) of all ranks.

    A single chunk is returned as it is.
    """
    if len(pieces) == 1:
        return pieces.reshape(pieces.shape[1:])
    shape = list(pieces.shape[1:])
    shape[axis] = length
    whole = ops.empty(tuple(shape))
    for group_rank in range(len(pieces)):
        part = _part(whole, axis, chunk_slice(length, len(pieces), group_rank))
        ops.copy(part, _part(pieces[group_rank], axis, slice(part.shape[axis])))
    return whole


def packed(ops: Ops, *arrays: Array) -> Array:
    """Pack arrays of one shape and type into one new array, for a single message."""
    whole = ops.empty((len(arrays), *arrays[0].shape), arrays[0].dtype, label="buffers")
    for number, x in enumerate(arrays):
        ops.copy(whole[number], x)
    return whole


def rounded(ops: Ops, x: Array, dtype: Dtype) -> Array:
    """Return x rounded to the dtype of activations; x itself if it already has it."""
    if x.dtype == dtype:
        return x
    y = ops.empty(x.shape, dtype)
    ops.copy(y, x)
    return y


def _part(x: Array, axis: int, where: slice) -> Array:
    """Return x[where] on an axis, as a view."""
    return x[(slice(None),) * (axis % x.ndim) + (where,)]
