"""Splits a model's blocks over the stages of a pipeline, so that no rank has much more work.

Blocks may cost different numbers of FLOPs. They stay in order, so a split is one number of blocks
for each stage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

Split = tuple[int, ...]  # blocks of each stage


class UnitFlops(NamedTuple):
    """FLOPs of the products in a forward pass: before the blocks, of each block, of the head.

    They are per token; only their ratios matter.
    """

    entry: float
    blocks: tuple[float, ...]
    head: float


def stage_flops(units: UnitFlops, stage_layers: Sequence[int]) -> list[tuple[float, float]]:
    """Return the FLOPs of each stage's forward pass: (entry and blocks, head)."""
    blocks = iter(units.blocks)
    sums: list[float] = [sum(islice(blocks, count)) for count in stage_layers]
    sums[0] += units.entry
    return [*zip(sums, [0.0] * (len(sums) - 1) + [units.head], strict=True)]


def balanced_layers(units: UnitFlops, stages_by_rank: Iterable[Iterable[int]]) -> Split:
    """Return the blocks per stage. stages_by_rank: the stages that each rank holds.

    A stage may hold no block. If all blocks cost the same, no split has a less busy busiest rank.
    Otherwise each stage keeps the share of FLOPs that it would have then, to within a block: it
    gets the blocks whose middle lies in it.
    """
    shares = even_split(units, list(map(tuple, stages_by_rank)))
    mean = sum(units.blocks) / len(units.blocks)
    ends = [mean * count for count in accumulate(shares)]
    split = [0] * len(shares)
    for flops, end in zip(units.blocks, accumulate(units.blocks), strict=True):
        split[min(bisect_right(ends, end - flops / 2), len(split) - 1)] += 1
    return tuple(split)


def even_split(units: UnitFlops, ranks: Sequence[Split]) -> Split:
    """Return the best split if every block cost the average. ranks: stages of each rank.

    Each block goes to the least busy rank, and there to the least busy stage. Of equal ranks the
    later one takes the block, since the first ranks stash more microbatches; of equal stages the
    earlier one takes it.
    """
    num_stages = 1 + max(map(max, ranks))
    split, flops = [0] * num_stages, [0.0] * num_stages
    flops[0] += units.entry
    flops[-1] += units.head
    for _ in units.blocks:
        least_busy = min(reversed(ranks), key=lambda held: sum(flops[stage] for stage in held))
        stage = min(least_busy, key=flops.__getitem__)
        split[stage] += 1
        flops[stage] += sum(units.blocks) / len(units.blocks)
    return tuple(split)


def stage_parts(stage: int, stage_layers: Split) -> tuple[range, bool, bool]:
    """Return (block indices of a stage, whether it is the first, whether it is the last)."""
    first = sum(stage_layers[:stage])
    blocks = range(first, first + stage_layers[stage])
    return blocks, stage == 0, stage == len(stage_layers) - 1
