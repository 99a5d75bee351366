"""Rotary positions: queries and keys are rotated by angles that grow with their position.

Number i of a head's first half and number i of its second half are the coordinates of a point,
which is rotated by p f_i at position p, so that the product of a query and a key depends on their
distance. The pairs are those of Hugging Face's files, whose weights therefore need no permutation.
Positions are global: a rank that holds other tokens of a row rotates them by other angles. Source:
Su et al., arXiv 2104.09864.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpipar.config.model import ModelConfig
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array


class Rotation:
    """Rotates queries and keys (B, T, heads, d), and rotates their gradients back.

    One object serves all blocks of a stage. table: (T, 2, d/2), cosine and sine by position.
    """

    def __init__(self, ops: Ops, config: ModelConfig) -> None:
        self.ops = ops
        assert config.head_dim, "completed"
        host = rope_table(
            config.seq_len, config.head_dim, config.rope_theta, config.rope_scaling
        ).astype(ops.accum_dtype)
        self.table = ops.empty(host.shape, ops.accum_dtype, label="buffers")
        ops.copy(self.table, ops.asarray(host))

    def forward(self, x: Array, positions: Array) -> None:
        """Rotate x in place by the positions (T,) of its tokens in their row."""
        self.ops.rope_forward(x, positions, self.table)

    def backward(self, dx: Array, positions: Array) -> None:
        """Rotate dx back in place."""
        self.ops.rope_backward_input(dx, positions, self.table)


def rope_table(length: int, width: int, theta: float, scaling: Sequence[float]) -> np.ndarray:
    """Return cosine and sine (P, 2, d/2) of the angles p f_i at positions p < length, float64."""
    angles = np.outer(np.arange(length), rope_frequencies(width, theta, scaling))
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def rope_frequencies(width: int, theta: float, scaling: Sequence[float]) -> np.ndarray:
    """Return f_i = theta^(-2i/d) of the d/2 points of a head, float64.

    scaling: (factor, low, high, length) of Llama 3, or () for none. A rotation with fewer than
    `low` turns within `length` positions becomes slower by `factor`, one with more than `high`
    turns stays, and between them the two are mixed. Source: Dubey et al., arXiv 2407.21783, and
    Hugging Face's `rope_type: llama3`.
    """
    frequencies = theta ** -(np.arange(0, width, 2) / width)
    if not scaling:
        return frequencies
    factor, low, high, length = scaling
    turns = length * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / factor)
