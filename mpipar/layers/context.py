"""The Context: everything about its rank that a layer needs to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mpipar.comm.group import Comm
from mpipar.comm.groups import Comms
from mpipar.config.sections import Config
from mpipar.layers.flat import FlatParams
from mpipar.layers.parallel.allgather_attention import AllGatherAttention
from mpipar.layers.parallel.local_attention import LocalAttention, RecomputedAttention
from mpipar.layers.parallel.ring_attention import RingAttention
from mpipar.layers.parallel.tokens import ReplicatedTokens
from mpipar.layers.parallel.ulysses_attention import UlyssesAttention
from mpipar.layers.param import ALONE, Copies
from mpipar.layers.recompute import ActivationRecompute
from mpipar.layers.stash import Layer
from mpipar.ops.functions import Ops

PLAIN = {"numbers": "sgd", "matrices": "sgd", "signs": "signs"}  # rules where nothing is updated


class LossFactor:
    """The factor of the gradient of the sum of all token losses; each step sets it.

    It is loss scale / number of tokens in the global batch, so that the gradients of all
    microbatches and data-parallel ranks add up to those of the mean loss.
    """

    value = 1.0


@dataclass(frozen=True)
class Context:
    """Array functions, groups, and what this rank holds.

    ops: see mpipar/ops. comms: the groups of this rank; `tp` is the one that cuts products.
    token_layout: which tokens this rank holds between two products, by default all of them.
    attention: how the ranks of cp attend to each other's tokens, see `attention_over`.
    recompute_blocks: the number of a stage's leading blocks that use activation recomputation.
    recompute_attention: the attention method of these blocks if they recompute only scores; None if
    they recompute everything from their input. factor: of the loss. make_flat: makes a stage's flat
    buffers, see `flats_of`. rules: {rule of a Param: the optimizer's}. tied: the copies of a table
    that the first and the last stage share.
    """

    ops: Ops
    comms: Comms
    token_layout: ReplicatedTokens = None  # type: ignore[assignment] # see __post_init__
    attention: MakeAttention = LocalAttention
    recompute_blocks: int = 0
    recompute_attention: MakeAttention | None = None
    factor: LossFactor = field(default_factory=LossFactor)
    make_flat: Callable[..., FlatParams] = FlatParams
    rules: Mapping[str, str] = field(default_factory=lambda: PLAIN)
    tied: Copies = ALONE

    def __post_init__(self) -> None:
        if self.token_layout is None:
            object.__setattr__(self, "token_layout", ReplicatedTokens(self.ops, self.comms["tp"]))

    @property
    def tp(self) -> Comm:
        return self.comms["tp"]

    @property
    def data(self) -> Comm:
        """The group of ranks that hold the same shard and read different data: dp x cp."""
        return self.comms["data"]

    def blocks(
        self, make: Callable[[Context, int], list[Layer]], indices: Iterable[int]
    ) -> list[list[Layer]]:
        """Return the layers of each of a stage's blocks; the leading ones use recomputation.

        make(context, index) returns the layers of the block of this index.
        """
        found: list[list[Layer]] = []
        for place, index in enumerate(indices):
            if place >= self.recompute_blocks:
                found.append(make(self, index))
            elif self.recompute_attention:
                found.append(make(replace(self, attention=self.recompute_attention), index))
            else:
                found.append([ActivationRecompute(make(self, index), self.comms.recorder)])
        return found


def recompute_options(config: Config) -> dict[str, Any]:
    """Return the fields of a Context that a Config determines, with those of recomputation."""
    memory = config.memory
    scores = memory.recompute == "attention"
    method = config.grid.cp_attention if config.grid.cp > 1 else None
    return {
        "attention": attention_over(method),
        "recompute_blocks": config.model.layers * (memory.recompute != "none"),
        "recompute_attention": attention_over(method, RecomputedAttention) if scores else None,
    }


def recomputed_blocks(config: Config) -> int:
    """Return how many leading blocks of a stage rerun their whole forward pass."""
    whole = config.memory.recompute == "block"
    return recompute_options(config)["recompute_blocks"] if whole else 0


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
