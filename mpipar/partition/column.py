"""Cut by output channels, the outputs left where they are: y (.., N/q) = x (.., K) @ w (K, N/q).

Every rank reads all of x and makes its own columns of y, so forward needs no barrier. Each rank's
dx = dy @ w^T is only its columns' part of the sum over N: one all-reduce, backward.
"""

shard_axis = 1
bias_is_cut = True
tokens_are_cut = False


def forward(ops, x, w, comm, name, sizes=None):
    """y (.., N/q) of x (.., K). Comm: none."""
    return ops.matmul(x, w)


def backward_input(ops, dy, w, comm, name, sizes=None):
    """dx (.., K), summed over everybody's columns. Comm: one all_reduce of dx."""
    return comm.all_reduce(ops.matmul_nt(dy, w), name), dy


def backward_weight(ops, x, dy, dw, comm, name, sizes=None):
    """dw (K, N/q) += x^T dy. Comm: none."""
    ops.matmul_tn_add(x, dy, dw)
