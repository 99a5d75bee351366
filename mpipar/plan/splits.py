"""Splits of blocks over stages: evenly, or so that the stages' times are balanced.

The last stage also has the head, and the first one keeps most microbatches. Devices of several
kinds take different times, and have room for different numbers of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mpipar.plan.cluster import Stack
from mpipar.plan.footprint import Kept, most_blocks
from mpipar.plan.layout import Layout, blocks_of_stages
from mpipar.plan.pipeline_time import balanced
from mpipar.plan.shape import Shape
from mpipar.plan.step_time import Blocks

HALVINGS = 12  # of the time in which stages are filled


def splits(
    shape: Shape,
    layout: Layout,
    stack: Stack,
    blocks: Callable[[], Blocks],
    gib: Sequence[float],
    used: Callable[[tuple[int, ...]], list[float]],
    kept: Kept,
) -> Iterator[tuple[int, ...]]:
    """Yield the blocks of each stage: an even split, and uneven ones that fit if ranks have one
    stage.

    blocks: gives the passes of each rank. gib: memory that each one may use. used: which share of
    it ranks take, the fullest and the emptiest ones among them. kept: of the layout.
    """
    even = blocks_of_stages(shape.layers, layout.stages)
    yield even
    if layout.pp == 1 or layout.chunks > 1:
        return
    if min(used(even)) > 1:  # removing a block from one rank adds one to another full rank
        return
    if max(used(even)) <= 1:
        uneven = both_shares(shape.layers, layout, blocks(), [shape.layers] * layout.pp)
        fit = [one for one in sorted(uneven - {even}) if max(used(one)) <= 1]
        yield from fit
        if fit or uneven == {even}:
            return
    most = most_blocks(shape, layout, stack, gib, kept)
    if min(most) >= 1 and sum(most) >= shape.layers:
        yield from sorted(both_shares(shape.layers, layout, blocks(), most))


def both_shares(
    layers: int, layout: Layout, blocks: Blocks, most: Sequence[int]
) -> set[tuple[int, ...]]:
    """Return the `shares` if ranks first wait for those before them, and if they hide these waits.

    The simulator tells which is nearer to a schedule. A split backward always fills the waits.
    """
    return {
        shares(layers, layout, blocks, most, waits) for waits in {False, not layout.family.split}
    }


def shares(
    layers: int, layout: Layout, blocks: Blocks, most: Sequence[int], waits: bool
) -> tuple[int, ...]:
    """Return the blocks of each stage with which the closed form of the passes is shortest.

    most: that a stage has room for; together enough for all layers. Bisection finds the shortest
    time within which all blocks are done, where each rank in turn takes as many as it can. waits:
    whether a rank first waits for those before it. The last stage also has the head.
    """
    m = layout.num_microbatches
    seconds, heads = [block.total for block in blocks], [0.0] * layout.pp
    heads[layout.last_rank] = blocks[layout.last_rank].head.total

    def within(limit: float) -> list[int]:
        counts, before = [], 0.0
        for second, head, room in zip(seconds, heads, most, strict=True):
            fit = int(((limit - before) / m - head) / second)
            counts.append(max(1, min(room, fit)))
            before += waits * counts[-1] * second
        return counts

    low = balanced(layers, layout, blocks)
    high = low + (m + layers) * max(seconds)
    while sum(within(high)) < layers:
        high *= 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(within(middle)) >= layers else (middle, high)
    counts = within(high)
    busy = [
        count * second + head for count, second, head in zip(counts, seconds, heads, strict=True)
    ]
    for _ in range(sum(counts) - layers):  # more are done within this time than there are
        rank = max((rank for rank in range(layout.pp) if counts[rank] > 1), key=busy.__getitem__)
        counts[rank] -= 1
        busy[rank] -= seconds[rank]
    return tuple(counts)
