"""Equal pieces of an axis, one for each rank of a group, whatever its length.

Where q does not divide the length, every piece is as long as the first, ceil(length/q), and the
last ones are padding, or hold nothing else: zeros go in, what comes of them is zero, and what is
put together again leaves it away.
"""

from __future__ import annotations

from mpipar.comm.grid import piece, share


def own(ops, x, axis, comm):
    """This rank's piece of x along an axis: a view, or a copy where it needs padding."""
    length = x.shape[axis]
    return pad(ops, _part(x, axis, piece(length, comm.size, comm.index)), axis,
               share(length, comm.size))


def pad(ops, x, axis, length):
    """x with zeros up to `length` along an axis; x itself where none are missing."""
    if x.shape[axis] == length:
        return x
    shape = list(x.shape)
    shape[axis] = length
    y = ops.zeros(shape, x.dtype, label="buffers")
    ops.copy(_part(y, axis, slice(x.shape[axis])), x)
    return y


def join(ops, pieces, axis, length):
    """The whole array, `length` long on an axis, of everybody's pieces (q, ...); of one, itself."""
    if len(pieces) == 1:
        return pieces[0]
    shape = list(pieces.shape[1:])
    shape[axis] = length
    whole = ops.empty(shape)
    for place in range(len(pieces)):
        part = _part(whole, axis, piece(length, len(pieces), place))
        ops.copy(part, _part(pieces[place], axis, slice(part.shape[axis])))
    return whole


def _part(x, axis, where):
    """x[where] on an axis, as a view."""
    return x[(slice(None),) * (axis % x.ndim) + (where,)]
