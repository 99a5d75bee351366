"""Context parallelism: causal attention over ranks that hold different tokens of the same rows.

A query needs the keys and values of all earlier tokens, most of which are on other ranks. Every
method has the same two functions, and its barriers are visible lines in these files:

    forward(here, q, k, v)                 -> y, saved
    backward_input(here, dy, saved, out)   writes dq, dk, dv to `out`

q, y, dy are (B, n, H, d), k and v (B, n, Hkv, d), for the n tokens that this rank holds, which
`grid.token_pieces` determines. here: an `Attending`. saved: what the backward pass needs.
There is no function for the weight gradient, because attention has no weights, so W crosses no
barrier of this group. During text generation, every rank of the group holds all tokens: see
context_cached.py.
"""

from __future__ import annotations

from mpipar.partition import context_gather, context_ring, context_whole
from mpipar.partition.context_ulysses import Ulysses
from mpipar.partition.contracts import ContextCut


def attention_over(method: str | None, whole: ContextCut = context_whole) -> ContextCut:
    """Return the module or object that has the two functions.

    method: of a resolved grid; None where every rank holds all tokens. whole: the functions of a
    rank that holds all tokens, of all heads or of some.
    """
    if method is None:
        return whole
    methods: dict[str, ContextCut] = {
        "ring": context_ring,
        "gather": context_gather,
        "ulysses": Ulysses(whole),
    }
    return methods[method]


def keeps_scores(method: str | None, head_width: int, tiled_head_width: int) -> bool:
    """Return whether attention stores its scores when it does not recompute them.

    Methods that merge partial results store none; neither do tiled kernels, which take heads up to
    `tiled_head_width` wide.
    """
    return method not in ("ring", "gather") and head_width > tiled_head_width
