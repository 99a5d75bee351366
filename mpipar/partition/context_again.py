"""Attention on a rank that holds all tokens of its rows, with scores recomputed for backward.

Instead of all probabilities it keeps two numbers for each query and head: the largest score and the
sum of exp(score - largest). This costs one more product of queries and keys. For the functions see
context.py.
"""

from __future__ import annotations

from mpipar.ops.signature import Array
from mpipar.partition.chunks import rounded
from mpipar.partition.context_whole import whole_positions
from mpipar.partition.contracts import Attending, Out, Saved


def forward(here: Attending, q: Array, k: Array, v: Array) -> tuple[Array, Saved]:
    """Return y (B, T, H, d), and what the backward pass needs."""
    places = whole_positions(here.batch)
    y, stats = here.ops.attention_block_forward(q, k, v, places, places)
    y = rounded(here.ops, y, q.dtype)
    return y, (q, k, v, y, stats)


def backward_input(here: Attending, dy: Array, saved: Saved, out: Out) -> None:
    """Write dq, dk, dv."""
    ops, places, (q, k, v, y, stats) = here.ops, whole_positions(here.batch), saved
    gradients = ops.attention_block_backward(
        dy, q, k, v, stats, ops.attention_delta(dy, y), q_pos=places, k_pos=places
    )
    for to, gradient in zip(out, gradients, strict=True):
        ops.copy(to, gradient)
