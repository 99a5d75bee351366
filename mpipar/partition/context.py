"""Context parallelism: one causal attention cut over ranks that hold other tokens of the same rows.

A query needs the keys and values of all earlier tokens, and most of them lie on other ranks. Every
method has the same two functions. Their barriers are visible lines in these files:

    forward(ops, q, k, v, batch, comm, name)                -> y, saved
    backward_input(ops, dy, saved, batch, comm, name, out)  writes dq, dk, dv to `out`

q, y, dy are (B, n, H, d), k and v (B, n, Hkv, d), of the n tokens that this rank holds. Batch says
where they lie in the row: `positions`, and `all_positions` of all ranks. saved: what backward
needs. comm: the group. `grid.token_pieces` says which tokens a rank holds. There is no function for
the weight gradient, because attention has no weight. So W crosses no barrier of this group. While
text is generated, every rank of the group holds all tokens: see context_cached.py.
"""

from mpipar.partition import context_gather, context_ring, context_whole
from mpipar.partition.context_ulysses import Ulysses


def attention_over(config, whole=context_whole):
    """What has the two functions for a resolved Config: a module or an object.

    whole: those of a rank that holds all tokens, of all heads or of some.
    """
    methods = {"ring": context_ring, "gather": context_gather, "ulysses": Ulysses(whole)}
    return methods[config.grid.cp_attention] if config.grid.cp > 1 else whole


def keeps_scores(config, tiled_head_width: int) -> bool:
    """Whether attention of a resolved Config keeps scores, if it does not make them again.

    Parts that are merged keep none, and kernels in tiles none of heads up to `tiled_head_width`.
    """
    return (config.grid.cp_attention not in ("ring", "gather")
            and config.model.head_dim > tiled_head_width)
