"""Splits of blocks over stages: evenly, or so that the stages' times are balanced.

The last stage also has the head, and the first one keeps most microbatches. Devices of several
kinds take different times, and have room for different numbers of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heapreplace

from mpipar.plan.cluster import Stack
from mpipar.plan.footprint import Orders, most_blocks
from mpipar.plan.layout import Layout, blocks_of_stages
from mpipar.plan.shape import Shape
from mpipar.plan.step_time import Blocks


def splits(shape: Shape, layout: Layout, stack: Stack, blocks: Callable[[], Blocks],
           gib: Sequence[float], used: Callable[[tuple[int, ...]], list[float]],
           orders: Orders) -> Iterator[tuple[int, ...]]:
    """Yield the blocks of each stage: an even split, and an uneven one that fits if ranks have one
    stage.

    blocks: gives the passes of each rank. gib: memory that each one may use. used: which share of
    it ranks take, the fullest and the emptiest ones among them.
    """
    even = blocks_of_stages(shape.layers, layout.stages)
    yield even
    if layout.pp == 1 or layout.chunks > 1:
        return
    if min(used(even)) > 1:  # removing a block from one rank adds one to another full rank
        return
    if max(used(even)) <= 1:
        uneven = shares(shape.layers, layout, blocks(), [shape.layers] * layout.pp)
        if uneven == even:
            return
        if max(used(uneven)) <= 1:
            yield uneven
            return
    most = most_blocks(shape, layout, stack, gib, orders)
    if min(most) >= 1 and sum(most) >= shape.layers:
        yield shares(shape.layers, layout, blocks(), most)


def shares(layers: int, layout: Layout, blocks: Blocks, most: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks of each stage that make the slowest stage as short as possible.

    most: that a stage has room for; together enough for all layers. Each block goes to the stage
    that is then shortest. The last stage also has the head.
    """
    counts = [1] * layout.pp
    seconds = [block.total for block in blocks]
    heads = [(rank == layout.last_rank) * blocks[rank].head.total for rank in range(layout.pp)]
    queue = [(2 * seconds[rank] + heads[rank], rank) for rank in range(layout.pp)
             if most[rank] > 1]
    heapify(queue)
    for _ in range(layers - layout.pp):
        while counts[queue[0][1]] >= most[queue[0][1]]:
            heapreplace(queue, (float("inf"), queue[0][1]))
        rank = queue[0][1]
        counts[rank] += 1
        heapreplace(queue, ((counts[rank] + 1) * seconds[rank] + heads[rank], rank))
    return tuple(counts)
