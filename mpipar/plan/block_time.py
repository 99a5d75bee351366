"""The time of one block and of the head on a rank: closed forms over shapes and a machine.

A product takes a start-up time, its FLOPs over one rate, and its bytes over another; the other
operations of a block cross memory a counted number of times. The layers define which products and
barriers there are, and `Shape.letters` how large they are.
"""

from __future__ import annotations

from functools import reduce
from itertools import product
from math import prod
from operator import add
from typing import NamedTuple

from mpipar.layers.costs import Barrier, Cost, Letters, array, value
from mpipar.plan.cluster import Cluster, Stack
from mpipar.plan.collectives import all_gather, all_reduce, all_to_all, exchange
from mpipar.plan.layout import Layout, segments
from mpipar.plan.shape import Shape

# How often an activation crosses memory, forward and backward, outside products: two norms and two
# residual sums with dropout; the activation function; the copies of q, k and v.
STREAM, WIDE, HEADS = (10, 12), (2, 3), (3, 4)
ROUTED = (4, 6)  # rows of tokens that are permuted by expert, and back
SCORES = (4, 5)  # scale, mask, softmax and dropout over scores stored in memory
LOGITS = 10  # how often a loss moves each logit, forward and backward
ALIGNED, UNALIGNED = 8, 0.4  # numbers; share of its rate of a product with others: chosen on steps
BARRIER = 0.07  # launch of a barrier over launches of a block's forward: chosen on steps
BACKWARD = 2.5  # FLOPs of fused attention, backward over forward: scores are recomputed
SLOWED = 0.5  # seconds that products lose per second of concurrent transfers: chosen on steps
SUM_OF_PARTS = 1.2  # time of reduce-scatter + all-gather over one all-reduce of the same bytes
BESIDE = 0.5  # of gathers for weight gradients: they overlap with other products

# Bytes of what crosses memory: the widened activation, q, logits, and scores where they are stored.
EXPERT_ROWS = "B*T*k"  # of the products of experts: a token has one for each of its experts
BYTES = {("B*T", widths): array("B*T", widths) for widths in ("f", "ff", "Q", "v")} | {
    (EXPERT_ROWS, widths): array(EXPERT_ROWS, widths) for widths in ("g", "gg", "D")
}
SCORE_BYTES = array("B*T*A", "h")


class Times(NamedTuple):
    """Seconds of a pass of a block, by what takes them.

    starts: by how much the processor's launches of its operations outlast the operations. tp, cp,
    ep: barriers of the axis. gathers: of sharded weights, and sums of their gradients.
    """

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    starts: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    gathers: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def times(self, many: float) -> Times:
        """Return the times of `many` of these passes."""
        return Times(*(many * part for part in self))

    def plus(self, other: Times) -> Times:
        """Return the times of both passes."""
        return Times(*map(add, self, other))


class BlockTimes(NamedTuple):
    """Passes of a block. again: what recomputation adds to `i`. head: all passes of the head."""

    f: Times
    i: Times
    w: Times
    again: Times
    head: Times

    @property
    def passes(self) -> Times:
        """The three passes together, without recomputation."""
        return self.f.plus(self.i).plus(self.w)

    @property
    def total(self) -> float:
        """Seconds of a forward and a whole backward."""
        return self.f.total + self.i.total + self.w.total + self.again.total


def product_rate(cluster: Cluster, stack: Stack) -> float:
    """Return the FLOPs per second of a large product, capped at the fastest ever measured."""
    return min(cluster.ceiling_tflops, cluster.product_tflops * stack.on(cluster).products) * 1e12


def elementwise_rate(cluster: Cluster, stack: Stack) -> float:
    """Return the bytes per second of elementwise operations that cross memory once each."""
    return cluster.hbm_gbytes_s * 1e9 / stack.on(cluster).elementwise


def product_seconds(
    m: float, n: float, k: float, cluster: Cluster, stack: Stack, more: float = 0.0
) -> float:
    """Return the seconds of a product (m, k) x (k, n). more: sizes of further experts' matrices."""
    numbers = m * k + k * n + m * n + more
    return (
        cluster.product_us * 1e-6
        + 2 * m * n * k / product_rate(cluster, stack)
        + stack.number_bytes * numbers / (cluster.product_gbytes_s * 1e9)
    )


def product_times(cost: Cost, sizes: Letters, cluster: Cluster, stack: Stack) -> list[float]:
    """Return the products' seconds of some layers: forward, input gradient, weight gradient."""
    found = [0.0] * 3
    for rows, inner, outer in cost.products:
        n = prod(map(sizes.__getitem__, rows.split("*")))
        depth, columns = (sum(map(sizes.__getitem__, side)) for side in (inner, outer))
        more = (sizes["x"] - 1) * depth * columns if rows == EXPERT_ROWS else 0.0
        for way, order in enumerate(
            ((n, columns, depth), (n, depth, columns), (columns, depth, n))
        ):
            found[way] += product_seconds(*order, cluster, stack, more)
    return found


def barrier_seconds(barrier: Barrier, sizes: Letters, cluster: Cluster, ranks: int) -> float:
    """Return the seconds of a barrier of tp; half an all-reduce takes longer than half its time."""
    whole = all_reduce(cluster, barrier.payload(sizes, ranks), ranks)
    return whole if barrier.kind == "all_reduce" else whole / 2 * SUM_OF_PARTS


def expert_seconds(barrier: Barrier, sizes: Letters, layout: Layout, cluster: Cluster) -> float:
    """Return the seconds of a barrier of ep: a gather, or an exchange of one part per rank."""
    nbytes = value(barrier.carries, sizes)
    if barrier.kind in ("all_gather", "reduce_scatter"):
        return all_gather(cluster, layout.ep * nbytes, layout.ep, layout.data_stride)
    return all_to_all(cluster, nbytes, layout.ep, layout.data_stride)


def block_times(shape: Shape, layout: Layout, cluster: Cluster, stack: Stack) -> BlockTimes:
    """Return the passes of a block on one microbatch, averaged over all blocks, and of the head."""
    sizes = shape.letters(layout.rows, layout.tp, layout.cp, stack.number_bytes, layout.ep)
    units = shape.costs(layout.sequence_parallel)
    stream = value(units.stream, sizes)
    blocks = shape.blocks(layout.sequence_parallel)
    found = [passes_of(cost, sizes, stream, layout, cluster, stack) for _, cost in blocks]
    if len(found) > 1:
        shares = [share for share, _ in blocks]
        found = [
            [
                reduce(Times.plus, map(Times.times, passes, shares))
                for passes in zip(*found, strict=True)
            ]
        ]
    head = head_times(units.head, sizes, cluster, stack)
    block = BlockTimes(*found[0], head._replace(tp=found[0][0].tp))
    return with_gathers(shape, layout, cluster, stack, block) if layout.zero > 1 else block


def passes_of(
    cost: Cost, sizes: Letters, stream: float, layout: Layout, cluster: Cluster, stack: Stack
) -> list[Times]:
    """Return forward, input gradient, weight gradient of a block, and what recomputation adds.

    stream: bytes of the activations between blocks.
    """
    products = product_times(cost, sizes, cluster, stack)
    attention, scores = attention_seconds(cost, sizes, cluster, stack)
    memory = elementwise_rate(cluster, stack)
    *_, (rows, _, up), _ = cost.products  # before the last one is what widens
    wide, heads = (value(BYTES[one], sizes) for one in ((rows, up), ("B*T", "Q")))
    routed = value(BYTES[rows, "D"], sizes) if rows == EXPERT_ROWS else 0.0
    elementwise = [
        (STREAM[way] * stream + WIDE[way] * wide + HEADS[way] * heads + ROUTED[way] * routed)
        / memory
        for way in (0, 1)
    ]
    start = stack.on(cluster).starts_us * 1e-6
    barriers = {
        (axis, phase): [one for one in cost.barriers if (one.axis, one.phase) == (axis, phase)]
        for axis, phase in product(("tp", "expert"), "FIW")
    }
    tp = {
        phase: sum(barrier_seconds(one, sizes, cluster, layout.tp) for one in barriers["tp", phase])
        for phase in "FIW"
    }
    ep = {
        phase: sum(expert_seconds(one, sizes, layout, cluster) for one in barriers["expert", phase])
        for phase in "FI"
    }
    cp = context_seconds(cost, sizes, layout, cluster, attention)
    launched = {
        phase: start * (1 + BARRIER * len(barriers["tp", phase]) * (layout.tp > 1))
        for phase in "FI"
    }
    f = started(
        launched["F"],
        Times(products[0], attention[0], elementwise[0] + scores[0], 0.0, tp["F"], cp[0], ep["F"]),
    )
    i = started(
        launched["I"],
        Times(products[1], attention[1], elementwise[1] + scores[1], 0.0, tp["I"], cp[1], ep["I"]),
    )
    w = started(
        start,
        Times(
            products[2],
            0.0,
            adding_seconds(cost, sizes, layout, cluster, stack),
            0.0,
            tp["W"] * BESIDE,
        ),
    )
    selected = Times(attention=attention[0], elementwise=scores[0])
    if stack.fused:
        half = Times(products[0] / 2, elementwise=elementwise[0])
        selected = half if stack.every_other else Times()
    return [f, i, w, {"none": Times(), "block": f, "attention": selected}[layout.recompute]]


def adding_seconds(
    cost: Cost, sizes: Letters, layout: Layout, cluster: Cluster, stack: Stack
) -> float:
    """Return the seconds of adding a microbatch's weight gradients to those of the step in memory.

    Where weights are sharded, gradients are sent away instead.
    """
    moved = value(cost.weights, sizes) * 2 * stack.gradient_bytes if layout.zero < 2 else 0.0
    return moved / (cluster.hbm_gbytes_s * 1e9)


def started(starts: float, kernels: Times) -> Times:
    """Return a pass whose kernels take `starts` seconds to launch: the longer of the two counts."""
    return kernels._replace(starts=max(0.0, starts - kernels.total))


def attention_seconds(cost: Cost, sizes: Letters, cluster: Cluster, stack: Stack):
    """Return ((forward, backward) seconds of attention's products, of moving its scores).

    Fused attention computes only the half of the square that is seen. Otherwise its products are
    like any others, and each one writes or reads all scores.
    """
    flops = value(cost.attention, sizes)
    if stack.fused:
        most = cluster.attention_tflops * stack.on(cluster).attention
        rate = min(cluster.ceiling_tflops, most) * 1e12
        return (flops / 2 / rate, BACKWARD * flops / 2 / rate), (0.0, 0.0)
    scores = value(SCORE_BYTES, sizes)
    memory = elementwise_rate(cluster, stack)
    forward = flops / product_rate(cluster, stack) + 2 * scores / (cluster.product_gbytes_s * 1e9)
    return (forward, 2 * forward), tuple(count * scores / memory for count in SCORES)


def context_seconds(cost: Cost, sizes: Letters, layout: Layout, cluster: Cluster, attention):
    """Return the (forward, backward) seconds that a ring of keys and values adds to attention.

    The products of a round hide its message, which slows them down; the first round waits for none.
    """
    if layout.cp == 1:
        return 0.0, 0.0
    ring = next(one for one in cost.barriers if (one.axis, one.phase) == ("cp", "F"))
    hop = exchange(cluster, ring.payload(sizes, layout.cp), layout.tp)
    return tuple(
        (layout.cp - 1) * beside(often * hop, part / layout.cp)
        for often, part in zip((1, 2), attention, strict=True)
    )


def beside(moved: float, window: float) -> float:
    """Return the seconds that transfers add to a window of computing: what is exposed, and the
    slowdown.
    """
    exposed = max(0.0, moved - window)
    return exposed + SLOWED * (moved - exposed)


def head_times(head: Cost, sizes: Letters, cluster: Cluster, stack: Stack) -> Times:
    """Return forward and backward of head and loss on one microbatch, without barriers.

    They have as many operations to launch as a pass of a block. Tensor cores are slow where the
    vocabulary is no multiple of ALIGNED; one that tp has to pad to cut it is a multiple.
    """
    moved, slower = LOGITS * value(BYTES["B*T", "v"], sizes), 1.0
    if not stack.pads and sizes["v"] % 1 == 0 and sizes["v"] % ALIGNED:
        slower = 1 / UNALIGNED
    return started(
        stack.on(cluster).starts_us * 1e-6,
        Times(
            slower * sum(product_times(head, sizes, cluster, stack)),
            elementwise=moved / elementwise_rate(cluster, stack),
        ),
    )


def with_gathers(shape, layout, cluster, stack, block: BlockTimes) -> BlockTimes:
    """Return the passes with what sharded weights add to them.

    Weights are gathered for forward and backward; gradients are summed after the backward.
    Transfers overlap with the products of neighbouring blocks, and slow them down. Weights that
    stay for the step are gathered for its first microbatch only. Where arrays are gathered one by
    one, the processor also launches a copy for each rank's piece.
    """
    arrays = stack.arrays or 1
    gather = arrays * sum(
        all_gather(cluster, one.elements * stack.number_bytes / arrays, one.ranks, one.stride)
        for one in segments(shape, layout, 1)
    )
    scatter = gather * stack.wire_bytes / stack.number_bytes
    copies = stack.arrays * layout.data_ranks * cluster.product_us * 1e-6
    often = 1.0 if layout.zero == 3 else 1 / layout.num_microbatches

    def added(moved: float, window: float) -> float:
        return often * (beside(moved, window) if stack.overlap else moved)

    gather, scatter = gather + copies, scatter + copies
    f, i = block.f, block.i
    backward = i.total + block.w.total + block.again.total
    return block._replace(
        f=f._replace(gathers=added(gather, f.total)),
        i=i._replace(gathers=added(gather + scatter, backward)),
    )
