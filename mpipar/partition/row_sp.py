"""The row cut with tokens cut between the products: y (B, T/q, N) of x (B, T, K/q).

Forward, a reduce-scatter sums over the ranks and gives each one its own tokens of y. Backward
gathers dy once, for both gradients. shares.py says what happens if q does not divide T.
"""

from mpipar.partition import tokens as held

shard_axis = 0
bias_is_cut = False
tokens_are_cut = True


def forward(ops, x, w, comm, name, sizes):
    """y (B, T/q, N), summed over everybody's channels. Comm: one reduce_scatter of y."""
    return held.scatter(ops, ops.matmul(x, w), comm, name)


def backward_input(ops, dy, w, comm, name, sizes):
    """dx (B, T, K/q) of dy (B, T/q, N), and dy of all tokens. Comm: one all_gather of dy."""
    dy = held.gather(ops, dy, sizes.tokens, comm, name)
    return ops.matmul_nt(dy, w), dy


def backward_weight(ops, x, dy, dw, comm, name, sizes):
    """dw (K/q, N) += x^T dy over all tokens."""
    ops.matmul_tn_add(x, dy, dw)
