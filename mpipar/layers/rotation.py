"""Rotary positions: queries and keys are rotated by angles that grow with their position.

Number i of a head's first half and number i of its second half are the coordinates of a point. At
position p the point is turned by p f_i. So the product of a query and a key depends on how far they
are apart. These pairs are those of Hugging Face's files, whose weights need no permutation.
Positions are global: a rank that holds other tokens of a row turns them by other angles. Source: Su
et al., arXiv 2104.09864.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpipar.ops.array_ops import rope_table
from mpipar.ops.signature import Array


class Rotation:
    """Turns queries and keys (B, T, heads, d), and takes the turn off their gradients.

    One object serves all blocks of a stage. table: (T, 2, d/2), cosine and sine by position.
    """

    def __init__(self, ops: Any, config: Any) -> None:
        self.ops = ops
        host = rope_table(config.seq_len, config.head_dim, config.rope_theta,
                          config.rope_scaling).astype(ops.statistics)
        self.table = ops.empty(host.shape, ops.statistics, label="buffers")
        ops.copy(self.table, ops.asarray(host))

    def forward(self, x: Array, positions: Array) -> None:
        """Turn x in place; positions (T,) of its tokens in their row."""
        self.ops.rope_forward(x, positions, self.table)

    def backward(self, dx: Array, positions: Array) -> None:
        """Turn dx back in place."""
        self.ops.rope_backward_input(dx, positions, self.table)


class NoRotation:
    """Leaves queries and keys as they are: the embedding has brought the positions in."""

    def __init__(self, ops: Any, config: Any) -> None:
        pass

    def forward(self, x: Array, positions: Array) -> None:
        """Do nothing."""

    def backward(self, dx: Array, positions: Array) -> None:
        """Do nothing."""


# --positions
ROTATIONS: dict[str, Callable[..., Rotation | NoRotation]] = {
    "learned": NoRotation, "rope": Rotation}
