"""Parallel layout (dp, pp, cp, tp, ep) and pipeline schedule; every layout that fits so many ranks.

`config.resolve` explains why a layout does not fit.
"""

import math
from collections.abc import Mapping
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


def shown_axes(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return (axis, size) in the order in which layouts are written; cp and ep only if above 1."""
    return [
        (axis, sizes[axis])
        for axis in ("dp", "pp", "cp", "tp", "ep")
        if axis not in ("cp", "ep") or sizes.get(axis, 1) > 1
    ]


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return a layout for a reader, as 'dp 2 x pp 2 x tp 1'."""
    return " x ".join(f"{axis} {size}" for axis, size in shown_axes(sizes))


def axes_text(sizes: Mapping[str, int]) -> str:
    """Return a layout as the value of --layout."""
    return ",".join(f"{axis}={size}" for axis, size in shown_axes(sizes))


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    low = [small for small in range(1, math.isqrt(number) + 1) if number % small == 0]
    return sorted({*low, *(number // small for small in low)})


def cuts_heads(tp: int, heads: int, kv_heads: int) -> bool:
    """Return whether tp ranks can hold equal numbers of heads, and whole key/value heads.

    With more ranks than key/value heads, some ranks hold copies of the same one.
    """
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def matching(
    given: tuple[int | None, int | None, int | None],
    world_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    cp: int = 1,
) -> list[tuple[int, int, int]]:
    """Return every (dp, pp, tp) with these axes (None = free), the default one first.

    They use all ranks, tp cuts the heads, and pp is at most layers. cp: the size of that axis,
    which is never chosen here.
    """
    ranks = world_size // cp
    options = [
        (ranks // (tp * pp), pp, tp)
        for tp in divisors(ranks)
        if world_size % cp == 0 and cuts_heads(tp, heads, kv_heads)
        for pp in divisors(ranks // tp)
        if pp <= layers
    ]
    fits = [one for one in options if all(map(lambda want, have: want in (None, have), given, one))]
    # The default: tp 2 if 4 divides the free ranks, pp 2 if even, the rest dp. A second tp rank
    # halves memory and work but communicates most, so the default is at most two. A second pp rank
    # communicates least. dp takes the rest, because it needs no more memory per rank as it grows.
    _, pp, tp = given
    free = ranks // math.prod(axis or 1 for axis in given)
    want_tp = tp or (2 if free % 4 == 0 else 1)
    left = free if tp else free // want_tp
    want_pp = pp or (2 if left % 2 == 0 else 1)
    return sorted(fits, key=lambda one: (abs(one[2] - want_tp), abs(one[1] - want_pp)))
