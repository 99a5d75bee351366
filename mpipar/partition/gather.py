"""Cut by output channels, the outputs collected again: the textbook's picture of a partitioned
layer.

y (.., N) = all-gather of x (.., K) @ w (K, N/q). Each layer stands alone: whole input, whole
output, one all-gather forward and one all-reduce backward per product, against one of each per
*pair* of products with the column and row cuts. Same gradients; it is here to be compared.
"""

shard_axis = 1
bias_is_cut = False


def forward(ops, x, w, comm, name, tokens=None):
    """y (.., N) of x (.., K). Comm: one all_gather of y."""
    return collect(ops.matmul_forward(x, w), comm, name)


def collect(x, comm, name):
    """Whole x (.., N) of everybody's columns (.., N/q). Comm: one all_gather."""
    parts = comm.all_gather(x, name)  # (q, .., N/q)
    del x  # not held while the parts are put side by side
    outer = range(1, parts.ndim - 1)
    return parts.transpose(*outer, 0, parts.ndim - 1).reshape(*parts.shape[1:-1], -1)


def backward_input(ops, dy, w, comm, name, tokens=None):
    """dx (.., K), summed over everybody's columns. Comm: one all_reduce of dx."""
    return comm.all_reduce(ops.matmul_backward_input(_own(dy, w, comm), w), name), dy


def backward_weight(ops, x, dy, dw, comm, name, tokens=None):
    """dw (K, N/q) += x^T (own columns of dy). Comm: none."""
    ops.matmul_backward_weight(x, _own(dy, dw, comm), dw)


def _own(dy, w, comm):
    """This rank's columns of the whole dy (.., N), as a view."""
    columns = w.shape[1]
    return dy[..., comm.index * columns:(comm.index + 1) * columns]
