"""LM head and cross-entropy, both cut by vocabulary: the full logits never exist anywhere.

Each rank computes the logits of its own rows of the table. The softmax needs three numbers per
token from every rank: the largest logit, the sum of exp(logit - largest), and the target's logit.
They travel together in one all-gather, and every rank combines them in the same way.

Letters: B batch, T tokens, N = B*T, D model width, V vocabulary.
"""

from __future__ import annotations

from mpipar.layers.context import Context
from mpipar.layers.param import Param
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class Head:
    """logits (N, V/tp) = x @ table^T.

    The table is stored as (V, D), like that of an embedding, so the product's three functions swap
    roles: forward multiplies by the transposed table.
    """

    def __init__(self, context: Context, table: Param) -> None:
        self.ops, self.token_layout, self.name = context.ops, context.token_layout, "head"
        self.table = table
        self.params = [table]

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return logits (N, V/tp) of x (B, T, D), the tokens that this rank holds.

        Comm: with --sequence-parallel one all_gather of x over tp.
        """
        x = self.token_layout.gather(x, stash.batch.shape[1], self.name)
        if stash.cache is not None:
            x = x[:, -1:]  # only the newest token determines what comes next
        stash[self.name, "x"] = x
        return self.ops.matmul_nt(x.reshape(-1, x.shape[-1]), self.table.data)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, D) of the tokens held, from dlogits (N, V/tp).

        Comm: one all_reduce of dx over tp (each rank has only its own rows of the table).
        """
        stash[self.name, "dy"] = dy
        dx = self.ops.matmul(dy, self.table.data)
        return self.token_layout.scatter(dx.reshape(stash[self.name, "x"].shape), self.name)

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the table's gradient."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        self.ops.matmul_tn_add(dy, x.reshape(-1, x.shape[-1]), self.table.grad)


class CrossEntropy:
    """Sum over the microbatch of -log softmax(logits)[target]."""

    params: tuple[Param, ...] = ()

    def __init__(self, context: Context, table: Param) -> None:
        self.ops, self.comm, self.name = context.ops, context.tp, "loss"
        self.vocab_size = table.shape[0]
        self.start = table.shard * table.local_shape[0]
        self.factor = context.factor

    def forward(self, logits: Array, stash: Stash) -> Array:
        """Return the sum of the token losses, a float; without targets, the logits unchanged.

        Comm: one all_gather over tp.
        """
        if stash.batch.targets is None:
            return logits
        targets = stash.batch.targets.reshape(-1)
        stats = self.ops.cross_entropy_forward(logits, targets, self.start, self.vocab_size)
        loss, sums = self.ops.cross_entropy_combine(self.comm.all_gather(stats, self.name))
        stash[self.name, "logits"] = logits, targets, sums
        return self.ops.sum(loss)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dlogits (N, V/tp), written over the logits; dy is None."""
        logits, targets, sums = stash.pop((self.name, "logits"))
        return self.ops.cross_entropy_backward_input(
            logits, targets, sums, self.start, self.vocab_size, self.factor.value
        )

    def backward_weight(self, stash: Stash) -> None:
        """Do nothing: there is no weight."""
