"""Attention of a rank that holds all tokens of its rows, and makes the scores again for backward.

It keeps one number for each query and head, the log of the sum of exp(score), in place of all
probabilities. That takes a product of queries and keys more. For the functions see context.py.
"""

from mpipar.partition.shares import rounded


def forward(ops, q, k, v, batch, comm, name):
    """y (B, T, H, d)."""
    places = whole_positions(batch)
    y, lse = ops.attention_block_forward(q, k, v, places, places)
    y = rounded(ops, y, q.dtype)
    return y, (q, k, v, y, lse)


def backward_input(ops, dy, saved, batch, comm, name, out):
    """Write dq, dk, dv."""
    q, k, v, y, lse = saved
    places = whole_positions(batch)
    gradients = ops.attention_block_backward(
        dy, q, k, v, lse, ops.attention_delta(dy, y), q_pos=places, k_pos=places)
    for to, gradient in zip(out, gradients, strict=True):
        ops.copy(to, gradient)


def whole_positions(batch):
    """The positions of all tokens of a row."""
    return batch.positions if batch.all_positions is None else batch.all_positions
