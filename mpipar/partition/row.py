"""Cut by input channels: y (.., N) = sum over ranks of x (.., K/q) @ w (K/q, N).

This is the other half of a pair: it reads what a column cut left behind. Forward, one all-reduce
adds the products. Backward, dy is whole on every rank and each rank makes its own channels of dx,
so there is no barrier.
"""

shard_axis = 0
bias_is_cut = False
tokens_are_cut = False


def forward(ops, x, w, comm, name, sizes=None):
    """y (.., N), summed over everybody's channels. Comm: one all_reduce of y."""
    return comm.all_reduce(ops.matmul(x, w), name)


def backward_input(ops, dy, w, comm, name, sizes=None):
    """dx (.., K/q) of dy (.., N)."""
    return ops.matmul_nt(dy, w), dy


def backward_weight(ops, x, dy, dw, comm, name, sizes=None):
    """dw (K/q, N) += x^T dy."""
    ops.matmul_tn_add(x, dy, dw)
