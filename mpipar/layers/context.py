"""The Context: everything about its rank that a layer needs to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mpipar.comm.group import Comm
from mpipar.comm.groups import Comms
from mpipar.config.sections import Config
from mpipar.config.train import OPTIMIZERS
from mpipar.layers.flat import FlatParams
from mpipar.layers.parallel.allgather_attention import AllGatherAttention
from mpipar.layers.parallel.linear import ReplicatedTokens
from mpipar.layers.parallel.local_attention import LocalAttention
from mpipar.layers.parallel.ring_attention import RingAttention
from mpipar.layers.parallel.ulysses_attention import UlyssesAttention
from mpipar.layers.param import ALONE, Copies
from mpipar.layers.recompute import RecomputedAttention
from mpipar.ops.functions import Ops


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
    attention: how the ranks of cp attend to each other's tokens, see `layer_options`.
    recompute_blocks: whether blocks use activation recomputation. factor: of the loss. make_flat:
    makes a stage's flat buffers, see `flats_of`. rules: {role of a Param: update rule}. tied:
    the copies of a table that the first and the last stage share.
    """

    ops: Ops
    comms: Comms
    token_layout: ReplicatedTokens = None  # type: ignore[assignment] # see __post_init__
    attention: MakeAttention = LocalAttention
    recompute_blocks: bool = False
    factor: LossFactor = field(default_factory=LossFactor)
    make_flat: Callable[..., FlatParams] = FlatParams
    rules: Mapping[str, str] = field(default_factory=lambda: OPTIMIZERS["sgd"])
    tied: Copies = ALONE

    def __post_init__(self) -> None:
        if self.token_layout is None:
            object.__setattr__(self, "token_layout", ReplicatedTokens(self.ops, self.comms["tp"]))

    @property
    def tp(self) -> Comm:
        return self.comms["tp"]


def layer_options(config: Config) -> dict[str, Any]:
    """Return the fields of a Context that a Config determines: attention and recomputation."""
    recompute = config.memory.recompute
    # On ranks that hold all tokens, of all heads or of some.
    whole = RecomputedAttention if recompute == "attention" else LocalAttention
    methods: dict[str | None, MakeAttention] = {  # by --cp-attention
        None: whole,
        "ring": RingAttention,
        "gather": AllGatherAttention,
        "ulysses": partial(UlyssesAttention, whole=whole),
    }
    method = config.grid.cp_attention if config.grid.cp > 1 else None
    return {"attention": methods[method], "recompute_blocks": recompute == "block"}


MakeAttention = Callable[..., LocalAttention]  # of ops, cp and the name of the layer
