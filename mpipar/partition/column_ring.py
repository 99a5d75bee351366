"""The cut column_sp with its all-gathers and its reduce-scatter sent in pieces: see ring.py.

While this rank multiplies the tokens of one rank, those of the next are on their way.
"""

from mpipar.comm.grid import piece, share
from mpipar.partition import ring, shares

shard_axis = 1
bias_is_cut = True
tokens_are_cut = True


def forward(ops, x, w, comm, name, sizes):
    """y (B, T, N/q) of x (B, T/q, K). Comm: one ring of x."""
    y = ops.empty((x.shape[0], sizes.tokens, w.shape[1]))
    for place, block in ring.pieces(ops, x, comm, name):
        own = y[:, piece(sizes.tokens, comm.size, place)]
        ops.copy(own, ops.matmul(block[:, :own.shape[1]], w))
    return y


def backward_input(ops, dy, w, comm, name, sizes):
    """dx (B, T/q, K), summed over everybody's columns. Comm: one ring of dx."""
    def product(place):
        dx = ops.matmul_nt(dy[:, piece(sizes.tokens, comm.size, place)], w)
        return shares.pad(ops, dx, 1, share(sizes.tokens, comm.size))

    return ring.total(ops, product, comm, name), dy


def backward_weight(ops, x, dy, dw, comm, name, sizes):
    """dw (K, N/q) += x^T dy over all tokens. Comm: one ring of x."""
    for place, block in ring.pieces(ops, x, comm, name):
        own = dy[:, piece(sizes.tokens, comm.size, place)]
        ops.matmul_tn_add(block[:, :own.shape[1]], own, dw)
