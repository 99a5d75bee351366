"""The methods of context parallelism: attention over ranks that hold different tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpipar.layers.parallel.allgather_attention import AllGatherAttention
from mpipar.layers.parallel.local_attention import LocalAttention
from mpipar.layers.parallel.ring_attention import RingAttention
from mpipar.layers.parallel.ulysses_attention import UlyssesAttention

MakeAttention = Callable[..., LocalAttention]  # of ops, cp and the name of the layer


def attention_over(
    method: str | None, whole: type[LocalAttention] = LocalAttention
) -> MakeAttention:
    """Return the class of --cp-attention; whole, where every rank holds all tokens.

    whole: attention of a rank that holds all tokens, of all heads or of some.
    """
    if method is None:
        return whole
    methods: dict[str, MakeAttention] = {
        "ring": RingAttention,
        "gather": AllGatherAttention,
        "ulysses": partial(UlyssesAttention, whole=whole),
    }
    return methods[method]


def keeps_scores(method: str | None, head_width: int, tiled_head_width: int) -> bool:
    """Return whether attention stores its scores when it does not recompute them.

    Methods that merge partial results store none; neither do tiled kernels, which take heads up to
    `tiled_head_width` wide.
    """
    return method not in ("ring", "gather") and head_width > tiled_head_width
