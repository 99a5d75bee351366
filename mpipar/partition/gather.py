"""Cut by output channels, with the outputs gathered: the textbook's picture of a partitioned layer.

y (.., N) = all-gather of x (.., K) @ w (K, N/q). Each layer stands alone, with a whole input and a
whole output. Every product takes an all-gather forward and an all-reduce backward. The column and
row cuts take one all-reduce each way for a *pair* of products. The gradients are the same. This cut
is here for comparison.
"""

from mpipar.partition import shares

shard_axis = 1
bias_is_cut = False
tokens_are_cut = False


def forward(ops, x, w, comm, name, sizes):
    """y (.., N) of x (.., K). Comm: one all_gather of y."""
    pieces = comm.all_gather(ops.matmul(x, w), name)  # (q, .., N/q)
    return shares.join(ops, pieces, -1, sizes.outer)


def backward_input(ops, dy, w, comm, name, sizes=None):
    """dx (.., K), summed over everybody's columns of dy (.., N). Comm: one all_reduce of dx."""
    dx = ops.matmul_nt(shares.own(ops, dy, -1, comm), w)
    return comm.all_reduce(dx, name), dy


def backward_weight(ops, x, dy, dw, comm, name, sizes=None):
    """dw (K, N/q) += x^T (own columns of dy (.., N))."""
    ops.matmul_tn_add(x, shares.own(ops, dy, -1, comm), dw)
