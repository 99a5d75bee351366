"""Attention by exchange of heads: all tokens of some heads, in place of some tokens of all heads.

An all-to-all gives each rank all tokens of H/q of the heads that it had. There attention is whole.
A second all-to-all takes the result back. So q must divide the heads of queries and of keys. Each
rank holds one run of tokens, since every rank does the whole triangle of its heads. Source: Jacobs
et al., arXiv 2309.14509.
"""

from mpipar.comm.grid import piece, runs, share


class Ulysses:
    """The two functions, around those of a rank that holds all tokens. whole: their module."""

    def __init__(self, whole):
        self.whole = whole

    def forward(self, ops, q, k, v, batch, comm, name):
        """y (B, n, H, d). Comm: two all_to_alls, of q, k and v together, and of y."""
        whole = _all_tokens(ops, (q, k, v), comm, name)
        y, saved = self.whole.forward(ops, *whole, batch, comm, name)
        own = ops.empty(q.shape, q.dtype)
        _own_tokens(ops, (y,), (own,), comm, name)
        return own, saved

    def backward_input(self, ops, dy, saved, batch, comm, name, out):
        """Write dq, dk, dv. Comm: two all_to_alls, of dy, and of dq, dk and dv together."""
        (dy,) = _all_tokens(ops, (dy,), comm, name)
        whole = tuple(ops.empty(x.shape, x.dtype) for x in saved[:3])
        self.whole.backward_input(ops, dy, saved, batch, comm, name, whole)
        _own_tokens(ops, whole, out, comm, name)


def _all_tokens(ops, arrays, comm, name):
    """Views (B, T, H/q, d) of arrays (B, n, H, d): all tokens of this rank's heads.

    Comm: one all_to_all.
    """
    heads = runs([share(x.shape[2], comm.size) for x in arrays])
    rows, tokens, _, width = arrays[0].shape
    shape = comm.size, rows, tokens, heads[-1].stop, width
    parts = ops.empty(shape, arrays[0].dtype, label="buffers")
    for place in range(comm.size):
        for inside, x in zip(heads, arrays, strict=True):
            ops.copy(parts[place][:, :, inside], x[:, :, piece(x.shape[2], comm.size, place)])
    received = comm.all_to_all(parts, name)
    whole = ops.empty((rows, comm.size * tokens, heads[-1].stop, width), arrays[0].dtype)
    for place in range(comm.size):
        ops.copy(whole[:, piece(whole.shape[1], comm.size, place)], received[place])
    return tuple(whole[:, :, inside] for inside in heads)


def _own_tokens(ops, arrays, out, comm, name):
    """Write to `out` (B, n, H, d) this rank's tokens of arrays (B, T, H/q, d), of all heads.

    Comm: one all_to_all.
    """
    heads = runs([x.shape[2] for x in arrays])
    rows, tokens, _, width = out[0].shape
    shape = comm.size, rows, tokens, heads[-1].stop, width
    parts = ops.empty(shape, arrays[0].dtype, label="buffers")
    for place in range(comm.size):
        for inside, x in zip(heads, arrays, strict=True):
            ops.copy(parts[place][:, :, inside], x[:, piece(x.shape[1], comm.size, place)])
    received = comm.all_to_all(parts, name)
    for place in range(comm.size):
        for inside, x in zip(heads, out, strict=True):
            ops.copy(x[:, :, piece(x.shape[2], comm.size, place)], received[place][:, :, inside])
