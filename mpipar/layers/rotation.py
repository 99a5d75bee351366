"""Rotary positions: queries and keys are rotated by angles that grow with their position.

Number i of a head's first half and number i of its second half are the coordinates of a point,
which is rotated by p f_i at position p, so that the product of a query and a key depends on their
distance. The pairs are those of Hugging Face's files, whose weights therefore need no permutation.
Positions are global: a rank that holds other tokens of a row rotates them by other angles. Source:
Su et al., arXiv 2104.09864.
"""

from __future__ import annotations

from mpipar.config.model import ModelConfig
from mpipar.ops.array_attention import rope_table
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
