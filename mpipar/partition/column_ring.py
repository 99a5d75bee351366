"""column_sp with its all-gathers and its reduce-scatter cut in pieces: see ring.py.

While this rank multiplies the tokens of one rank, those of the next are on their way.
"""

from mpipar.grid import piece, share
from mpipar.partition import ring
from mpipar.partition.tokens import pad

shard_axis = 1
bias_is_cut = True


def forward(ops, x, w, comm, name, tokens):
    """y (B, T, N/q) of x (B, T/q, K). Comm: one ring of x."""
    y = ops.empty((x.shape[0], tokens, w.shape[1]))
    for place, block in ring.pieces(ops, x, comm, name):
        own = y[:, piece(tokens, comm.size, place)]
        ops.copy(own, ops.matmul_forward(block[:, :own.shape[1]], w))
    return y


def backward_input(ops, dy, w, comm, name, tokens):
    """dx (B, T/q, K), summed over everybody's columns. Comm: one ring of dx."""
    def product(place):
        dx = ops.matmul_backward_input(dy[:, piece(tokens, comm.size, place)], w)
        return pad(ops, dx, share(tokens, comm.size))

    return ring.total(ops, product, comm, name), dy


def backward_weight(ops, x, dy, dw, comm, name, tokens):
    """dw (K, N/q) += x^T dy over all tokens. Comm: one ring of x."""
    for place, block in ring.pieces(ops, x, comm, name):
        own = dy[:, piece(tokens, comm.size, place)]
        ops.matmul_backward_weight(block[:, :own.shape[1]], own, dw)
