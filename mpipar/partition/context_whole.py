"""Attention of a rank that holds all tokens of its rows. For the functions see context.py."""


def forward(ops, q, k, v, batch, comm, name):
    """y (B, T, H, d)."""
    y, probs = ops.attention_forward(q, k, v, batch.positions, batch.positions)
    return y, (q, k, v, probs)


def backward_input(ops, dy, saved, batch, comm, name, out):
    """Write dq, dk, dv."""
    ops.attention_backward_input(
        dy, *saved, batch.positions, batch.positions, out=out)
