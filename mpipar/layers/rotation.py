"""Rotary positions: queries and keys are rotated by angles that grow with their position.

Number i of a head's first half and number i of its second half are the coordinates of a point. At
position p the point is turned by p f_i. So the product of a query and a key depends on how far they
are apart. These pairs are those of Hugging Face's files, whose weights need no permutation.
Positions are global: a rank that holds other tokens of a row turns them by other angles. Source: Su
et al., arXiv 2104.09864.
"""

from __future__ import annotations

from mpipar.ops.llama_ops import rope_table


class Rotation:
    """Turns queries and keys (B, T, heads, d), and takes the turn off their gradients.

    One object serves all blocks of a stage. table: (T, 2, d/2), cosine and sine by position.
    """

    def __init__(self, ops, config):
        self.ops = ops
        host = rope_table(config.seq_len, config.head_dim, config.rope_theta,
                          config.rope_scaling).astype(ops.statistics)
        self.table = ops.empty(host.shape, ops.statistics, label="buffers")
        ops.copy(self.table, ops.asarray(host))

    def forward(self, x, positions):
        """Turn x in place; positions (T,) of its tokens in their row."""
        self.ops.rope_forward(x, positions, self.table)

    def backward(self, dx, positions):
        """Turn dx back in place."""
        self.ops.rope_backward_input(dx, positions, self.table)


class NoRotation:
    """Leaves queries and keys as they are: the embedding has brought the positions in."""

    def __init__(self, ops, config):
        pass

    def forward(self, x, positions):
        """Do nothing."""

    def backward(self, dx, positions):
        """Do nothing."""


ROTATIONS = {"learned": NoRotation, "rope": Rotation}  # --positions
