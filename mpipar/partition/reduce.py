"""Cut by input channels, each layer alone: y (.., N) = sum over ranks of x (.., K/q) @ w (K/q, N).

This is the mirror image of the `gather` cut. x is whole on every rank, and each rank multiplies its
own channels of it. Forward, one all-reduce adds the products. Backward, each rank makes only its
own channels of dx, so one all-gather joins them. The gradients are the same. This cut is here for
comparison.
"""

from mpipar.partition import row, shares

shard_axis = 0
bias_is_cut = False
tokens_are_cut = False


def forward(ops, x, w, comm, name, sizes=None):
    """y (.., N), summed over everybody's channels of x (.., K). Comm: one all_reduce of y."""
    return row.forward(ops, shares.own(ops, x, -1, comm), w, comm, name)


def backward_input(ops, dy, w, comm, name, sizes):
    """dx (.., K) of dy (.., N). Comm: one all_gather of dx."""
    pieces = comm.all_gather(ops.matmul_nt(dy, w), name)  # (q, .., K/q)
    return shares.join(ops, pieces, -1, sizes.inner), dy


def backward_weight(ops, x, dy, dw, comm, name, sizes=None):
    """dw (K/q, N) += (own channels of x)^T dy."""
    ops.matmul_tn_add(shares.own(ops, x, -1, comm), dy, dw)
