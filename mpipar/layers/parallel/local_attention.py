"""Attention on a rank that holds all tokens of its rows, and the form of attention over ranks.

Context parallelism is causal attention over ranks that hold different tokens of the same rows. A
query needs the keys and values of all earlier tokens, most of which are on other ranks. Each method
is a file with the same two functions, in which its barriers are lines. There is no function for the
weight gradient, because attention has no weights, so W crosses no barrier of cp.

q, y, dy are (B, n, H, d), k and v (B, n, Hkv, d), for the n tokens that this rank holds, which
`grid.token_pieces` determines.
"""

from __future__ import annotations

from typing import TypeAlias

from mpipar.comm.group import Comm
from mpipar.layers.stash import Batch
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, ThreeArrays

Saved: TypeAlias = tuple[Array, ...]  # what the backward pass needs from the forward pass


class LocalAttention:
    """Attention over all tokens here, which keeps the probabilities for backward.

    comm: the ranks of cp. name: of the barriers.
    """

    def __init__(self, ops: Ops, comm: Comm, name: str) -> None:
        self.ops, self.comm, self.name = ops, comm, name

    def forward(self, q: Array, k: Array, v: Array, batch: Batch) -> tuple[Array, Saved]:
        """Return y (B, n, H, d), and what the backward pass needs, with q, k and v first."""
        places = whole_positions(batch)
        y, probs = self.ops.attention_forward(q, k, v, places, places)
        return y, (q, k, v, probs)

    def backward_input(self, dy: Array, saved: Saved, batch: Batch, out: ThreeArrays) -> None:
        """Write dq, dk and dv to the three arrays of `out`."""
        (q, k, v, probs), places = saved, whole_positions(batch)
        self.ops.attention_backward_input(dy, q, k, v, probs, places, places, out=out)


def whole_positions(batch: Batch) -> Array:
    """Return the positions of all tokens of a row."""
    return batch.positions if batch.all_positions is None else batch.all_positions
