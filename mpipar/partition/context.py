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

from __future__ import annotations

from mpipar.partition import context_gather, context_ring, context_whole
from mpipar.partition.context_ulysses import Ulysses
from mpipar.partition.contracts import ContextCut


def attention_over(method: str | None, whole: ContextCut = context_whole) -> ContextCut:
    """Return what has the two functions: a module or an object.

    method: of a resolved grid; None where every rank holds all tokens. whole: the functions of such
    a rank, of all heads or of some.
    """
    if method is None:
        return whole
    methods: dict[str, ContextCut] = {
        "ring": context_ring, "gather": context_gather, "ulysses": Ulysses(whole)}
    return methods[method]


def keeps_scores(method: str | None, head_width: int, tiled_head_width: int) -> bool:
    """Return whether attention keeps scores, if it does not make them again.

    Parts that are merged keep none, and kernels in tiles none of heads up to `tiled_head_width`.
    """
    return method not in ("ring", "gather") and head_width > tiled_head_width
