"""Splits a model's blocks over the stages of a pipeline, so that no rank has much more work.

Blocks may cost different numbers of FLOPs. They stay in order, so a split is one number of blocks
for each stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, permutations
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
    """Return the blocks per stage that minimize the FLOPs of the busiest pipeline rank.

    stages_by_rank: the stages that each rank holds. A stage may hold no block.

    The search starts as if all blocks cost the same, and moves to the best neighbouring split as
    long as that is better. If all blocks do cost the same, or each rank holds one stage, the result
    is optimal. Otherwise a better split may exist, but it cannot gain the FLOPs of a whole block;
    an exact answer would require a search through all splits.
    """
    ranks = list(map(tuple, stages_by_rank))

    def loads(split: Split) -> list[float]:
        """Return the FLOPs of each rank, the busiest first."""
        stages = [sum(flops) for flops in stage_flops(units, split)]
        return sorted((sum(stages[stage] for stage in held) for held in ranks), reverse=True)

    split = even_split(units, ranks)
    while True:
        limit = loads(split)[0]
        better = min((filled_split(units, ranks, limit), *moved_splits(split)), key=loads)
        if loads(better) >= loads(split):
            return split
        split = better


def even_split(units: UnitFlops, ranks: list[Split]) -> Split:
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


def filled_split(units: UnitFlops, ranks: list[Split], limit: float) -> Split:
    """Return the split that fills stages backwards, each rank to less than `limit` FLOPs.

    A rank with several stages fills each with an equal part of its remaining room. Blocks that fit
    nowhere go to the first stage. If each rank holds one stage, that happens only if every split
    reaches the limit.
    """
    last = max(map(max, ranks))
    room = {held: limit - units.entry * (0 in held) - units.head * (last in held) for held in ranks}
    split, left = [0] * (last + 1), list(units.blocks)
    for stage in reversed(range(last + 1)):
        held = next(held for held in ranks if stage in held)
        part = room[held] / sum(other <= stage for other in held)
        while left and left[-1] < part:
            part -= left[-1]
            room[held] -= left.pop()
            split[stage] += 1
    split[0] += len(left)
    return tuple(split)


def moved_splits(split: Split) -> Iterator[Split]:
    """Yield all splits with one block less in one stage and one more in another.

    The stages between them hold as many blocks as before, each shifted by one.
    """
    for source, target in permutations(range(len(split)), 2):
        if split[source]:
            moved = list(split)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)
