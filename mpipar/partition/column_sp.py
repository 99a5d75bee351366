"""The column cut with tokens cut between the products: y (B, T, N/q) of x (B, T/q, K).

Forward gathers x and multiplies. Backward, a reduce-scatter of dx takes the place of the
all-reduce. A rank keeps only its own tokens of x, so the weight gradient gathers x again. shares.py
says what happens if q does not divide T.
"""

from mpipar.partition import tokens as held

shard_axis = 1
bias_is_cut = True
tokens_are_cut = True


def forward(ops, x, w, comm, name, sizes):
    """y (B, T, N/q) of x (B, T/q, K). Comm: one all_gather of x."""
    return ops.matmul(held.gather(ops, x, sizes.tokens, comm, name), w)


def backward_input(ops, dy, w, comm, name, sizes):
    """dx (B, T/q, K), summed over everybody's columns. Comm: one reduce_scatter of dx."""
    return held.scatter(ops, ops.matmul_nt(dy, w), comm, name), dy


def backward_weight(ops, x, dy, dw, comm, name, sizes):
    """dw (K, N/q) += x^T dy over all tokens. Comm: one all_gather of x."""
    ops.matmul_tn_add(held.gather(ops, x, sizes.tokens, comm, name), dy, dw)
