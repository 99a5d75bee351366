"""Attention on a rank that holds all tokens of its rows and keeps the probabilities for backward.

For the functions see context.py.
"""

from __future__ import annotations

from mpipar.data.rows import Batch
from mpipar.ops.signature import Array
from mpipar.partition.contracts import Attending, Out, Saved


def forward(here: Attending, q: Array, k: Array, v: Array) -> tuple[Array, Saved]:
    """Return y (B, T, H, d), and what the backward pass needs."""
    places = whole_positions(here.batch)
    y, probs = here.ops.attention_forward(q, k, v, places, places)
    return y, (q, k, v, probs)


def backward_input(here: Attending, dy: Array, saved: Saved, out: Out) -> None:
    """Write dq, dk, dv."""
    (q, k, v, probs), places = saved, whole_positions(here.batch)
    here.ops.attention_backward_input(dy, q, k, v, probs, places, places, out=out)


def whole_positions(batch: Batch) -> Array:
    """Return the positions of all tokens of a row."""
    return batch.positions if batch.all_positions is None else batch.all_positions
