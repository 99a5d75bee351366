"""The cut row_sp with its reduce-scatter and its all-gather sent in pieces: see ring.py.

While the sum of one rank's tokens is on its way, this rank multiplies those of the next.
"""

from mpipar.comm.grid import piece, share
from mpipar.partition import ring, shares

shard_axis = 0
bias_is_cut = False
tokens_are_cut = True


def forward(ops, x, w, comm, name, sizes):
    """y (B, T/q, N), summed over everybody's channels. Comm: one ring of y."""
    def product(place):
        y = ops.matmul(x[:, piece(sizes.tokens, comm.size, place)], w)
        return shares.pad(ops, y, 1, share(sizes.tokens, comm.size))

    return ring.total(ops, product, comm, name)


def backward_input(ops, dy, w, comm, name, sizes):
    """dx (B, T, K/q) of dy (B, T/q, N), and dy of all tokens. Comm: one ring of dy."""
    dx = ops.empty((dy.shape[0], sizes.tokens, w.shape[0]))
    whole = ops.empty((dy.shape[0], sizes.tokens, dy.shape[2]))
    for place, block in ring.pieces(ops, dy, comm, name):
        rows = piece(sizes.tokens, comm.size, place)
        own = whole[:, rows]
        ops.copy(own, block[:, :own.shape[1]])
        ops.copy(dx[:, rows], ops.matmul_nt(own, w))
    return dx, whole


def backward_weight(ops, x, dy, dw, comm, name, sizes):
    """dw (K/q, N) += x^T dy over all tokens."""
    ops.matmul_tn_add(x, dy, dw)
