"""Parallel layout (dp, pp, cp, tp, ep) and pipeline schedule."""

import math
from dataclasses import dataclass

from mpipar.comm.grid import AXES, PIECES_PER_RANK
from mpipar.config.setting import setting

SCHEDULES = (  # the rows of mpipar.pipeline.schedules.catalog
    "naive",
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "interleaved-zb",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
)
AUTO = "auto"  # for --layout: chosen by predicted steps


@dataclass(frozen=True)
class GridConfig:
    """Parallel layout, dp x pp x cp x tp = number of ranks, and pipeline schedule."""

    dp: int | None = setting(
        None, "data-parallel replicas (default: the remaining ranks)", low=1, high=2**17
    )
    pp: int | None = setting(
        None, "pipeline ranks (default 2 if the number of ranks allows it)", low=1, high=2**12
    )
    cp: int = setting(
        1,
        "context-parallel ranks: each holds T/cp tokens of every row, and attention spans them",
        low=1,
        high=2**16,
    )
    cp_attention: str | None = setting(
        None,
        "with --cp: ring (default) = keys and values circulate; gather = they are gathered;"
        " ulysses = ranks exchange tokens for heads",
        choices=tuple(PIECES_PER_RANK),
    )
    tp: int | None = setting(
        None, "tensor-parallel ranks (default 2 from 4 ranks on)", low=1, high=2**16
    )
    ep: int = setting(
        1,
        "expert-parallel ranks: neighbours in dp x cp that divide the experts of a block and"
        " exchange tokens",
        low=1,
        high=2**12,
    )
    islands: int | None = setting(
        None,
        "DiLoCo: equal parts of dp that train apart and average their weights once in"
        " --outer-interval steps; each is a whole pp x dp/N x cp x tp (default: none)",
        low=1,
        high=2**12,
    )
    rank_order: str = setting(
        "pp,dp,cp,tp", "axes from outermost to innermost; ranks of the last axis are adjacent"
    )
    schedule: str = setting(
        "1f1b",
        "pipeline schedule, the order of forward and backward passes",
        choices=SCHEDULES,
    )
    schedule_csv: str | None = setting(
        None, "run the schedule in this CSV file (torch.distributed.pipelining's format)"
    )
    chunks: int | None = setting(
        None, "stages per pipeline rank (default: the schedule's)", low=1, high=2**10
    )
    stage_layers: tuple[int, ...] | None = setting(
        None, "blocks of each stage, as 3,2,2,1 (default: equal cost, including the head)", low=0
    )
    num_microbatches: int | None = setting(
        None, "microbatches per step and replica; more = smaller pipeline bubble", low=1, high=2**16
    )

    @property
    def island_dp(self) -> int:
        """Replicas inside an island: all of them where there are none. dp must be chosen."""
        assert self.dp, self
        return self.dp // (self.islands or 1)

    @property
    def num_ranks(self) -> int:
        """Ranks of all axes; an axis that is still to be chosen counts as 1."""
        return math.prod(getattr(self, axis) or 1 for axis in AXES)
