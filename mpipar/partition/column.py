"""Cut by output channels; the outputs stay where they are: y (.., N/q) = x (.., K) @ w (K, N/q).

Every rank reads all of x and makes its own columns of y, so forward needs no barrier. Backward,
each rank's dx = dy @ w^T is only its columns' part of the sum over N. One all-reduce adds the
parts.
"""

shard_axis = 1
bias_is_cut = True
tokens_are_cut = False


def forward(ops, x, w, comm, name, sizes=None):
    """y (.., N/q) of x (.., K)."""
    return ops.matmul(x, w)


def backward_input(ops, dy, w, comm, name, sizes=None):
    """dx (.., K), summed over everybody's columns. Comm: one all_reduce of dx."""
    return comm.all_reduce(ops.matmul_nt(dy, w), name), dy


def backward_weight(ops, x, dy, dw, comm, name, sizes=None):
    """dw (K, N/q) += x^T dy."""
    ops.matmul_tn_add(x, dy, dw)
