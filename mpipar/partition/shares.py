"""Equal pieces of an axis of any length, one for each rank of a group.

If q does not divide the length, every piece has ceil(length/q) entries. The last ones are padded
with zeros, and may hold nothing else. Padding stays zero and is dropped when the pieces are joined.
"""

from __future__ import annotations

from mpipar.comm.grid import piece, share


def own(ops, x, axis, comm):
    """This rank's piece of x along an axis: a view, or a copy if it needs padding."""
    length = x.shape[axis]
    return pad(ops, _part(x, axis, piece(length, comm.size, comm.index)), axis,
               share(length, comm.size))


def pad(ops, x, axis, length):
    """x with zeros up to `length` along an axis; x itself if it is long enough."""
    if x.shape[axis] == length:
        return x
    shape = list(x.shape)
    shape[axis] = length
    y = ops.zeros(shape, x.dtype, label="buffers")
    ops.copy(_part(y, axis, slice(x.shape[axis])), x)
    return y


def join(ops, pieces, axis, length):
    """The whole array, `length` long on an axis, from everybody's pieces (q, ...).

    A single piece is returned as it is.
    """
    if len(pieces) == 1:
        return pieces[0]
    shape = list(pieces.shape[1:])
    shape[axis] = length
    whole = ops.empty(shape)
    for place in range(len(pieces)):
        part = _part(whole, axis, piece(length, len(pieces), place))
        ops.copy(part, _part(pieces[place], axis, slice(part.shape[axis])))
    return whole


def packed(ops, *arrays):
    """Arrays of one shape and type as one new array, for one message."""
    whole = ops.empty((len(arrays), *arrays[0].shape), arrays[0].dtype, label="buffers")
    for place, x in enumerate(arrays):
        ops.copy(whole[place], x)
    return whole


def rounded(ops, x, dtype):
    """x as activations; x itself if it has their type."""
    if x.dtype == dtype:
        return x
    y = ops.empty(x.shape, dtype)
    ops.copy(y, x)
    return y


def _part(x, axis, where):
    """x[where] on an axis, as a view."""
    return x[(slice(None),) * (axis % x.ndim) + (where,)]
