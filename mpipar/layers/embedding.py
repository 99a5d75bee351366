"""Token and position embedding, the token table cut by vocabulary.

Each rank looks up the tokens whose rows it holds and writes zeros for the others. One sum over the
ranks gives each the embedding of the tokens that it holds (see partition/tokens.py). Letters: B
batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from mpipar.layers.param import Param


class Embedding:
    """x = token_table[tokens] + position_table[positions]."""

    def __init__(self, context, token_table: Param, seq_len, *, std):
        self.ops, self.held, self.name = context.ops, context.held, "embedding"
        self.tokens = token_table  # (V, D) cut on V; perhaps shared with the head
        self.positions = Param(
            context, "embedding.positions", (seq_len, token_table.shape[1]), std=std)
        self.params = [self.tokens, self.positions]
        self.start = token_table.cut_index * token_table.local_shape[0]

    def forward(self, x, stash):
        """y (B, T, D) of the tokens held; reads the microbatch's tokens, ignores x.

        Comm: held.scatter over tp.
        """
        batch = stash.batch
        y = self.ops.embedding_forward(batch.tokens, self.tokens.data, self.start)
        y = self.held.scatter(y, self.name)
        positions = self.held.positions(batch.positions)
        return self.ops.position_forward(y, positions, self.positions.data)

    def backward_input(self, dy, stash):
        """Keep dy for the tables; no layer below needs a gradient."""
        stash[self.name, "dy"] = dy

    def backward_weight(self, stash):
        """Accumulate the gradients of both tables. Comm: held.gather over tp."""
        dy, batch = stash.pop((self.name, "dy")), stash.batch
        dy = self.held.gather(dy, batch.shape[1], self.name)
        self.ops.embedding_backward_weight(batch.tokens, dy, self.tokens.grad, self.start)
        self.ops.position_backward_weight(batch.positions, dy, self.positions.grad)
