"""The time of a layout's step: passes, bubble, messages, sums and update in closed form.

The time of a linear schedule is that of the rank on the critical path: the stages before it run
forward once, then it computes without a pause, and the stages before it run backward once. Each
pipeline rank may have its own kind of device, and its own number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpipar.pipeline.forms import Letters
from mpipar.plan.block_time import BlockTimes, beside, block_times
from mpipar.plan.cluster import Cluster, Stack
from mpipar.plan.collectives import all_gather, all_reduce, exchange
from mpipar.plan.footprint import fullest_ranks
from mpipar.plan.layout import Layout, Segment, blocks_of_stages, rank_segments
from mpipar.plan.shape import Shape

Blocks = Sequence[BlockTimes]  # the passes of a block and of the head on each pipeline rank
# (layout, passes of each rank, blocks of each stage) -> seconds of all passes
Pipeline = Callable[[Layout, Blocks, tuple[int, ...]], float]
Collective = Callable[[Cluster, float, int, int], float]  # (cluster, bytes, ranks, stride)


class StepTime(NamedTuple):
    """Seconds of a step by part; they add up to `total`.

    The first four are those in which the busiest rank computes; see `Times`.
    """

    products: float
    attention: float
    elementwise: float
    starts: float
    again: float
    tp: float
    cp: float
    ep: float
    bubble: float
    hops: float
    sums: float
    update: float

    @property
    def compute(self) -> float:
        """Seconds in which the busiest rank computes, without recomputation."""
        return self.products + self.attention + self.elementwise + self.starts

    @property
    def total(self) -> float:
        return sum(self)


def step_time(
    shape: Shape,
    layout: Layout,
    cluster: Cluster | Sequence[Cluster],
    stack: Stack,
    pipeline: Pipeline | None = None,
    counts: tuple[int, ...] | None = None,
) -> StepTime:
    """Return the step of a layout, with the parts of its busiest pipeline rank.

    cluster: of all devices, or of those of each pipeline rank. pipeline: by default the closed
    form; see pipeline_time.py for a lower bound and for the simulator. counts: blocks of each
    stage, by default equally many.
    """
    clusters = by_rank(layout, cluster)
    blocks = passes_by_rank(shape, layout, clusters, stack)
    counts = counts or blocks_of_stages(shape.layers, layout.stages)
    return step_of(shape, layout, clusters, blocks, stack, pipeline or closed, counts)


def step_of(
    shape: Shape,
    layout: Layout,
    clusters: Sequence[Cluster],
    blocks: Blocks,
    stack: Stack,
    pipeline: Pipeline,
    counts: tuple[int, ...],
) -> StepTime:
    """Return the step of given passes; otherwise like `step_time`."""
    passes = pipeline(layout, blocks, counts)
    busy = busy_seconds(layout, blocks, counts)
    rank = max(range(layout.pp), key=busy.__getitem__)
    kinds = clusters if clusters[0].name != clusters[-1].name else ()
    sums, update = max(
        (
            behind_the_passes(shape, layout, clusters[one], stack, one, blocks[one], counts)
            for one in fullest_ranks(layout, counts, kinds)
        ),
        key=sum,
    )
    hops = messages_seconds(shape, layout, clusters, stack)
    return spent(layout, rank, blocks[rank], counts, passes - busy[rank], hops, (sums, update))


def rank_times(
    shape: Shape,
    layout: Layout,
    clusters: Sequence[Cluster],
    stack: Stack,
    pipeline: Pipeline,
    counts: tuple[int, ...],
) -> list[StepTime]:
    """Return the step as each pipeline rank spends it; one whose sums are done waits for others."""
    blocks = passes_by_rank(shape, layout, clusters, stack)
    whole = step_of(shape, layout, clusters, blocks, stack, pipeline, counts)
    own = [
        spent(
            layout,
            rank,
            block,
            counts,
            0.0,
            whole.hops,
            behind_the_passes(shape, layout, clusters[rank], stack, rank, block, counts),
        )
        for rank, block in enumerate(blocks)
    ]
    return [one._replace(bubble=whole.total - one.total) for one in own]


def spent(
    layout: Layout,
    rank: int,
    block: BlockTimes,
    counts: tuple[int, ...],
    bubble: float,
    hops: float,
    after: tuple[float, float],
) -> StepTime:
    """Return the step of a pipeline rank. after: the seconds of its sums and of its update."""
    m, (sums, update) = layout.num_microbatches, after
    many = m * layout.blocks_of(rank, counts)
    own = block.passes.times(many)
    if rank == layout.last_rank:
        own = own.plus(block.head.times(m))
    return StepTime(
        *own[:4],
        many * block.again.total,
        own.tp,
        own.cp,
        own.ep,
        bubble,
        hops,
        own.gathers + sums,
        update,
    )


def by_rank(layout: Layout, cluster: Cluster | Sequence[Cluster]) -> Sequence[Cluster]:
    """Return the kind of device of each pipeline rank."""
    return (cluster,) * layout.pp if isinstance(cluster, Cluster) else cluster


def passes_by_rank(
    shape: Shape, layout: Layout, clusters: Sequence[Cluster], stack: Stack
) -> Blocks:
    """Return the passes of a block on each pipeline rank, the same object on equal devices."""
    known = {
        one.name: block_times(shape, layout, one, stack)
        for one in {cluster.name: cluster for cluster in clusters}.values()
    }
    return [known[cluster.name] for cluster in clusters]


def behind_the_passes(
    shape: Shape,
    layout: Layout,
    cluster: Cluster,
    stack: Stack,
    rank: int,
    block: BlockTimes,
    counts: tuple[int, ...],
) -> tuple[float, float]:
    """Return a pipeline rank's seconds of (sums that no window hides, the update).

    Sums begin when the last microbatch's backward has left its last chunk's first block. Weights
    are gathered during the first microbatch's forward.
    """
    own, each = rank_segments(shape, layout, rank, counts), layout.blocks_of(rank, counts) - 1
    windows = [
        max(0, each) * seconds
        for seconds in (block.i.total + block.w.total + block.again.total, block.f.total)
    ]
    return (
        sum_seconds(shape, layout, cluster, stack, own, windows),
        update_seconds(layout, cluster, stack, own),
    )


def busy_seconds(layout: Layout, blocks: Blocks, counts: tuple[int, ...]) -> list[float]:
    """Return the seconds that each pipeline rank computes. The last stage also has the head."""
    m = layout.num_microbatches
    found = [m * block.total * layout.blocks_of(rank, counts) for rank, block in enumerate(blocks)]
    found[layout.last_rank] += m * blocks[layout.last_rank].head.total
    return found


def closed(layout: Layout, blocks: Blocks, counts: tuple[int, ...]) -> float:
    """Return the seconds of all passes of a linear or looped schedule, in closed form."""
    busy, waits = busy_seconds(layout, blocks, counts), bubble_of(layout, blocks, counts)
    return max(one + two for one, two in zip(busy, waits, strict=True))


def bubble_of(layout: Layout, blocks: Blocks, counts: tuple[int, ...]) -> list[float]:
    """Return the seconds that each pipeline rank waits: the stages before it, forward and back.

    The schedule's row has the cost for each block before: its bubble on two ranks.
    """
    found, waits = [], 0.0
    for count, block in zip(counts[: layout.pp], blocks, strict=True):
        found.append(waits)
        f, i, w = block.f.total, block.i.total + block.again.total, block.w.total
        letters = Letters(2, layout.num_microbatches, 1, f, i, w)
        waits += count * layout.family.bubble.value(letters)
    # With a split backward the last rank does not set the pace: every rank has the same gap
    # somewhere.
    return [found[-1]] * layout.pp if layout.family.split else found


def message_bytes(shape: Shape, layout: Layout, stack: Stack) -> float:
    """Return the bytes between two stages: each rank of tp sends part of a microbatch's
    activations.
    """
    return layout.rows * shape.tokens / layout.cp * shape.width * stack.number_bytes / layout.tp


def messages_seconds(
    shape: Shape, layout: Layout, clusters: Sequence[Cluster], stack: Stack
) -> float:
    """Return the seconds of messages between stages, by the slowest links; the network joins kinds.

    If there are more ranks than a node has, `hop_seconds` includes that already.
    """
    kinds = {one.name: one for one in clusters}.values()
    seconds = max(hop_seconds(shape, layout, one, stack) for one in kinds)
    if len(kinds) > 1 and layout.ranks <= min(one.per_node() for one in kinds):
        message = message_bytes(shape, layout, stack)
        seconds += (
            2 * (len(kinds) - 1) * max(exchange(one, message, one.per_node()) for one in kinds)
        )
    return seconds


def hop_seconds(shape: Shape, layout: Layout, cluster: Cluster, stack: Stack) -> float:
    """Return the exposed seconds of messages between stages.

    They travel down once and up once. A stack without overlap also waits for those of each chunk
    and microbatch, once for a forward and a backward together, whose messages cross a link in both
    directions at the same time. The slowest link sets the pace.
    """
    if layout.pp == 1:
        return 0.0
    message = message_bytes(shape, layout, stack)
    hops, stride, each = layout.stages - 1, layout.stage_stride, cluster.per_node()
    nodes = -(-layout.pp * stride // each)
    across = min(hops, layout.chunks * nodes - 1) if nodes > 1 else 0
    near, far = (exchange(cluster, message, to) for to in (stride, max(stride, each)))
    seconds = 2 * ((hops - across) * near + across * far)
    if not stack.overlap:
        seconds += layout.num_microbatches * layout.chunks * (far if across else near)
    return seconds


def sum_seconds(
    shape: Shape,
    layout: Layout,
    cluster: Cluster,
    stack: Stack,
    own: list[Segment],
    windows: Sequence[float],
) -> float:
    """Return the seconds of sums of a rank's segments that no window hides.

    windows: seconds of computing (beside gradient sums, beside gathers of weights).
    """

    def over_all(collective: Collective, element_bytes: float) -> float:
        return sum(
            collective(cluster, one.elements * element_bytes, one.ranks, one.stride) for one in own
        )

    if layout.zero > 1:  # gathers of blocks overlap with others; the tables are units, too
        often = layout.num_microbatches if layout.zero == 3 else 1
        tables = shape.table_parameters * stack.number_bytes / layout.tp
        return often * all_gather(cluster, tables, layout.data_ranks, layout.data_stride)
    beside_backward, beside_forward = windows
    if layout.zero == 0:
        sums = over_all(all_reduce, stack.wire_bytes)
        return beside(sums, beside_backward) if stack.overlap else sums
    sums, weights = (over_all(all_gather, size) for size in (stack.wire_bytes, stack.number_bytes))
    if not stack.overlap:
        return sums + weights
    return beside(sums, beside_backward) + beside(weights, beside_forward)


def update_seconds(layout: Layout, cluster: Cluster, stack: Stack, own: list[Segment]) -> float:
    """Return the seconds of clearing gradients, norm and optimizer."""
    return seconds_of_a_number(cluster, stack) * sum(
        one.elements / (one.ranks if layout.zero else 1) for one in own
    )


def seconds_of_a_number(cluster: Cluster, stack: Stack) -> float:
    """Return the seconds that the update of a parameter takes: bytes over the rate of memory.

    Its gradient is cleared, read for the norm, and read again; the optimizer's numbers are read and
    written, and the weight is written.
    """
    moved = 3 * stack.gradient_bytes + 2 * stack.optimizer_bytes + stack.weight_bytes
    return moved / (cluster.hbm_gbytes_s * 1e9)
