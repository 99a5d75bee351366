"""How long a step of a layout takes: passes, bubble, messages, sums and update in closed form.

The time of a linear schedule is that of the rank on the critical path. The stages before it run
forward once. Then it computes without a pause, and the stages before it run backward once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mpipar.pipeline.forms import Letters
from mpipar.plan.block_time import BlockTimes, beside, block_times
from mpipar.plan.cluster import Cluster, Stack
from mpipar.plan.collectives import all_gather, exchange
from mpipar.plan.layout import Layout, blocks_of_stages, rank_parameters
from mpipar.plan.shape import Shape


class StepTime(NamedTuple):
    """Seconds of a step by part; they add up to `total`."""

    compute: float  # of the busiest rank: products, attention, elementwise, starts
    again: float
    tp: float
    cp: float
    bubble: float
    hops: float
    sums: float
    update: float

    @property
    def total(self) -> float:
        return sum(self)



def step_time(shape: Shape, layout: Layout, cluster: Cluster, stack: Stack,
              pipeline: Callable | None = None) -> StepTime:
    """The step of a layout.

    pipeline: (layout, block times, blocks of each stage) -> seconds of all passes; by default the
    closed form. See pipeline_time.py for a bound from below and for the simulator.
    """
    block = block_times(shape, layout, cluster, stack)
    counts = blocks_of_stages(shape.layers, layout.stages)
    busy = busy_seconds(layout, block, counts)
    passes = (pipeline or closed)(layout, block, counts)
    rank = max(range(layout.pp), key=lambda rank: busy[rank])
    return rank_time(shape, layout, cluster, stack, rank, block, passes)


def rank_times(shape: Shape, layout: Layout, cluster: Cluster, stack: Stack,
               pipeline: Callable) -> list[StepTime]:
    """The step as each pipeline rank spends it; a rank that has done its sums waits for others."""
    block = block_times(shape, layout, cluster, stack)
    passes = pipeline(layout, block, blocks_of_stages(shape.layers, layout.stages))
    found = [rank_time(shape, layout, cluster, stack, rank, block, passes)
             for rank in range(layout.pp)]
    total = step_time(shape, layout, cluster, stack, lambda *_: passes).total
    return [one._replace(bubble=one.bubble + total - one.total) for one in found]


def rank_time(shape, layout, cluster, stack, rank: int, block: BlockTimes,
              passes: float) -> StepTime:
    """The parts of a step on one pipeline rank. passes: seconds of the whole pipeline."""
    counts = blocks_of_stages(shape.layers, layout.stages)
    blocks, m = layout.blocks_of(rank, counts), layout.num_microbatches
    elements = rank_parameters(shape, layout, rank, counts)
    head = (rank == layout.last_rank) * m * block.head
    return StepTime(
        m * blocks * compute_of(block) + head, m * blocks * block.again.total,
        m * blocks * tp_of(block), m * blocks * (block.f.cp + block.i.cp),
        passes - m * blocks * block.total - head,
        hop_seconds(shape, layout, cluster, stack),
        m * blocks * (block.f.gathers + block.i.gathers)
        + sum_seconds(shape, layout, cluster, stack, elements, window_of(layout, block, blocks)),
        update_seconds(layout, cluster, stack, elements))


def window_of(layout: Layout, block: BlockTimes, blocks: int) -> tuple[float, float]:
    """Seconds of computing (beside the sums of gradients, beside the gathers of weights).

    Sums begin when the last microbatch's backward has left its last chunk's first block. Weights
    are gathered beside the first microbatch's forward.
    """
    each = max(0, blocks - 1)
    return (each * (block.i.total + block.w.total + block.again.total), each * block.f.total)


def busy_seconds(layout: Layout, block: BlockTimes, counts: tuple[int, ...]) -> list[float]:
    """Seconds that each pipeline rank computes. The last stage also has the head."""
    m, whole = layout.num_microbatches, block.total
    found = [m * whole * layout.blocks_of(rank, counts) for rank in range(layout.pp)]
    found[layout.last_rank] += m * block.head
    return found


def closed(layout: Layout, block: BlockTimes, counts: tuple[int, ...]) -> float:
    """Seconds of all passes of a linear or looped schedule, in closed form."""
    busy, waits = busy_seconds(layout, block, counts), bubble_of(layout, block, counts)
    return max(one + two for one, two in zip(busy, waits, strict=True))


def compute_of(block: BlockTimes) -> float:
    """Computing of a block's three passes, without what runs again."""
    return sum(one.total - one.tp - one.cp - one.gathers for one in (block.f, block.i, block.w))


def tp_of(block: BlockTimes) -> float:
    """Barriers of tp in a block's three passes, without what runs again."""
    return block.f.tp + block.i.tp + block.w.tp


def bubble_of(layout: Layout, block: BlockTimes, counts: tuple[int, ...]) -> list[float]:
    """Seconds that each pipeline rank waits: the stages before it, forward and back.

    The schedule's row says what that costs for each block before: its bubble on two ranks.
    """
    f, i, w = block.f.total, block.i.total + block.again.total, block.w.total
    gap = layout.family.bubble.value(Letters(2, layout.num_microbatches, 1, f, i, w))
    found = [gap * sum(counts[:rank]) for rank in range(layout.pp)]
    # With a split backward no last rank sets the pace: every rank has the same gap somewhere.
    return [found[-1]] * layout.pp if layout.family.split else found


def hop_seconds(shape: Shape, layout: Layout, cluster: Cluster, stack: Stack) -> float:
    """Seconds of messages between stages that nothing hides.

    They go down once and up once. A stack without overlap also waits for those of each chunk and
    microbatch. It waits once for a forward and a backward, whose messages cross a link in both
    directions at once. The slowest link sets the pace.
    """
    if layout.pp == 1:
        return 0.0
    numbers = layout.rows * shape.tokens / layout.cp * shape.width
    message = numbers * stack.number_bytes / layout.tp  # each rank of tp sends a part of it
    hops, stride, each = layout.stages - 1, layout.stage_stride, cluster.per_node()
    nodes = -(-layout.pp * stride // each)
    across = min(hops, layout.chunks * nodes - 1) if nodes > 1 else 0
    near, far = (exchange(cluster, message, to) for to in (stride, max(stride, each)))
    seconds = 2 * ((hops - across) * near + across * far)
    if not stack.overlap:
        seconds += layout.num_microbatches * layout.chunks * (far if across else near)
    return seconds


def sum_seconds(shape, layout, cluster, stack, elements: float,
                windows: tuple[float, float]) -> float:
    """Seconds of sums of a rank's parameters over the data ranks that no window covers."""
    sums = all_gather(cluster, elements * stack.wire_bytes, layout.data_ranks, layout.data_stride)
    weights = all_gather(
        cluster, elements * stack.number_bytes, layout.data_ranks, layout.data_stride)
    beside_backward, beside_forward = windows
    if layout.zero == 0:
        return beside(2 * sums, beside_backward) if stack.overlap else 2 * sums
    if layout.zero > 1:  # the tables are units, too
        often = layout.num_microbatches if layout.zero == 3 else 1
        tables = shape.table_parameters * stack.number_bytes / layout.tp
        return often * all_gather(cluster, tables, layout.data_ranks, layout.data_stride)
    if not stack.overlap:
        return sums + weights
    return beside(sums, beside_backward) + beside(weights, beside_forward)


def update_seconds(layout, cluster, stack, elements: float) -> float:
    """Seconds of clearing gradients, norm, and optimizer: bytes over the memory's rate."""
    if layout.zero:
        elements /= layout.data_ranks
    moved = elements * (stack.gradient_bytes + stack.optimizer_bytes)
    return moved / (cluster.hbm_gbytes_s * 1e9)
