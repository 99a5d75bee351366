"""Attention on a rank that holds all tokens of its rows, which keeps no probabilities."""

from __future__ import annotations

from mpipar.layers.parallel.chunks import rounded
from mpipar.layers.parallel.local_attention import LocalAttention, Saved, whole_positions
from mpipar.layers.stash import Batch
from mpipar.ops.signature import Array, ThreeArrays


class RecomputedAttention(LocalAttention):
    """`LocalAttention` that recomputes the scores for backward.

    Instead of all probabilities it keeps two numbers for each query and head: the largest score and
    the sum of exp(score - largest). This costs one more product of queries and keys.
    """

    def forward(self, q: Array, k: Array, v: Array, batch: Batch) -> tuple[Array, Saved]:
        """Return y (B, T, H, d), and what the backward pass needs."""
        places = whole_positions(batch)
        y, stats = self.ops.attention_block_forward(q, k, v, places, places)
        y = rounded(self.ops, y, q.dtype)
        return y, (q, k, v, y, stats)

    def backward_input(self, dy: Array, saved: Saved, batch: Batch, out: ThreeArrays) -> None:
        """Write dq, dk, dv."""
        ops, places, (q, k, v, y, stats) = self.ops, whole_positions(batch), saved
        gradients = ops.attention_block_backward(
            dy, q, k, v, stats, ops.attention_delta(dy, y), q_pos=places, k_pos=places
        )
        for to, gradient in zip(out, gradients, strict=True):
            ops.copy(to, gradient)
