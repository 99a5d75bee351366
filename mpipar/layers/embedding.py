"""Token embedding, with or without learned positions; the token table is cut by vocabulary.

Each rank looks up the tokens whose rows it holds and writes zeros for the others. One sum over the
ranks then gives each rank the embeddings of the tokens that it holds (see `ReplicatedTokens`).
Letters: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from mpipar.layers.context import Context
from mpipar.layers.param import Param
from mpipar.layers.stash import Layer, Stash
from mpipar.ops.signature import Array


class TokenEmbedding:
    """x = token_table[tokens], without positions, which attention adds."""

    def __init__(
        self, context: Context, token_table: Param, longest_row: int, *, std: float
    ) -> None:
        self.ops, self.token_layout, self.name = context.ops, context.token_layout, "embedding"
        self.tokens = token_table  # (V, D) cut on V; perhaps shared with the head
        self.params = [self.tokens]
        self.start = token_table.shard * token_table.local_shape[0]

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, D) of the tokens held, for the microbatch's tokens; x is ignored.

        Comm: one all_reduce of y over tp.
        """
        y = self.ops.embedding_forward(stash.batch.tokens, self.tokens.data, self.start)
        return self.token_layout.scatter(y, self.name)

    def backward_input(self, dy: Array, stash: Stash) -> Array:  # type: ignore[return]
        """Keep dy for the tables; no layer below needs a gradient."""
        stash[self.name, "dy"] = dy

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradient of the table.

        Comm: with --sequence-parallel one all_gather of dy over tp.
        """
        self.of_tokens(stash)

    def of_tokens(self, stash: Stash) -> Array:
        """Accumulate the gradient of the token table; return dy of all tokens (B, T, D).

        Comm: with --sequence-parallel one all_gather of dy over tp.
        """
        dy = self.token_layout.gather(stash.pop((self.name, "dy")), stash.batch.shape[1], self.name)
        self.ops.embedding_backward_weight(stash.batch.tokens, dy, self.tokens.grad, self.start)
        return dy


class Embedding(TokenEmbedding):
    """x = token_table[tokens] + position_table[positions].

    Shorter rows use the first rows of the table, and the others get no gradient.
    """

    def __init__(
        self, context: Context, token_table: Param, longest_row: int, *, std: float
    ) -> None:
        super().__init__(context, token_table, longest_row, std=std)
        self.positions = Param(
            context, "embedding.positions", (longest_row, token_table.shape[1]), std=std
        )
        self.params = [self.tokens, self.positions]

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, D) of the tokens held. Comm: one all_reduce of y over tp."""
        y = super().forward(x, stash)
        # (T,), or (B, T) for each row
        positions = self.token_layout.positions(stash.batch.positions)
        return self.ops.position_forward(y, positions, self.positions.data)

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradients of both tables.

        Comm: with --sequence-parallel one all_gather of dy over tp.
        """
        dy = self.of_tokens(stash)
        self.ops.position_backward_weight(stash.batch.positions, dy, self.positions.grad)


# --positions
EMBEDDINGS: dict[str, Callable[..., Layer]] = {"learned": Embedding, "rope": TokenEmbedding}
