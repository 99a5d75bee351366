"""How long one block and one head take on a rank: closed forms over shapes and a machine.

A product takes a start, its FLOPs over a rate, and its bytes over another. The
rest of a block crosses memory a counted number of times. Letters: n tokens of a microbatch on a
rank, D F a k h as in shape.py, t ranks of tp.
"""

from __future__ import annotations

from typing import NamedTuple

from mpipar.plan.cluster import Cluster, Stack
from mpipar.plan.collectives import all_gather, all_reduce, exchange
from mpipar.plan.layout import Layout
from mpipar.plan.shape import Shape

# How often an activation crosses memory, forward and backward, beside the products: two norms and
# two residual sums with dropout; the activation function; the copies of q, k and v.
STREAM, WIDE, HEADS = (10, 12), (2, 3), (3, 4)
SCORES = (8, 10)  # scale, mask, softmax and dropout over scores that lie in memory
LOGITS = 7  # how often a loss moves each logit, forward and backward
BACKWARD = 2.5  # FLOPs of fused attention backward, over those forward: scores are made again
SLOWED = 1.2  # seconds that products lose for a second of transfers beside them
SUM_OF_PARTS = 1.2  # a reduce-scatter and an all-gather over an all-reduce of the same bytes


class Times(NamedTuple):
    """Seconds of a pass of a block, by what takes them."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    starts: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    gathers: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, other: Times) -> Times:
        return Times(*(one + two for one, two in zip(self, other, strict=True)))


class BlockTimes(NamedTuple):
    """Passes of a block. again: what recomputation adds to `i`. head: all passes of the head."""

    f: Times
    i: Times
    w: Times
    again: Times
    head: float

    @property
    def all(self) -> Times:
        """A forward and a whole backward."""
        return self.f.plus(self.i).plus(self.w).plus(self.again)


def product_seconds(m: float, n: float, k: float, cluster: Cluster, stack: Stack) -> float:
    """Seconds of a product (m, k) x (k, n)."""
    return (cluster.product_us * 1e-6
            + 2 * m * n * k / (cluster.product_tflops * 1e12 * stack.products)
            + stack.number_bytes * (m * k + k * n + m * n) / (cluster.product_gbytes_s * 1e9))


def block_times(shape: Shape, layout: Layout, cluster: Cluster, stack: Stack) -> BlockTimes:
    """The passes of one block on one microbatch, and those of the head."""
    t, width, size = layout.tp, shape.width, stack.number_bytes
    n = layout.rows * shape.tokens / layout.cp
    shapes = ((shape.qkv / t, width), (width, shape.attended / t), (shape.up / t, width),
              (width, shape.ffn / t))
    products = [sum(product_seconds(*order(columns, depth), cluster, stack)
                    for columns, depth in shapes)
                for order in (lambda columns, depth: (n, columns, depth),
                              lambda columns, depth: (n, depth, columns),
                              lambda columns, depth: (columns, depth, n))]
    attention, scores = attention_seconds(shape, layout, cluster, stack)
    whole = n / t if layout.sequence_parallel else n
    memory = cluster.hbm_gbytes_s * 1e9 / stack.elementwise
    elementwise = [size * (STREAM[way] * whole * width + WIDE[way] * n * shape.up / t
                           + HEADS[way] * n * shape.attended / t) / memory for way in (0, 1)]
    start = cluster.layer_us * 1e-6
    tp = 2 * all_reduce(cluster, n * width * size, t)
    if layout.sequence_parallel:
        tp *= SUM_OF_PARTS
    cp = context_seconds(shape, layout, cluster, stack, attention)
    f = Times(products[0], attention[0], elementwise[0] + scores[0], start, tp, cp[0])
    i = Times(products[1], attention[1], elementwise[1] + scores[1], start, tp, cp[1])
    # With tokens that are cut, the weight gradients need the whole inputs: they are gathered again,
    # beside other products.
    w = Times(products[2], starts=start, tp=tp / 4 if layout.sequence_parallel else 0.0)
    again = {"none": Times(), "block": f,
             "attention": Times() if stack.fused else Times(
                 attention=attention[0], elementwise=scores[0])}[layout.recompute]
    if layout.zero > 1:
        f, i = with_gathers(shape, layout, cluster, stack, (f, i.plus(w).plus(again), i))
    return BlockTimes(f, i, w, again, head_seconds(shape, layout, cluster, stack, tp))


def attention_seconds(shape, layout, cluster, stack):
    """((forward, backward) seconds of its products, and of crossing memory with its scores).

    Fused attention computes the half of the square that is seen.
    """
    t, c = layout.tp, layout.cp
    flops = 4 * layout.rows * (shape.tokens / c) * shape.tokens * shape.attended / t
    rate = cluster.attention_tflops * 1e12 * stack.attention
    if stack.fused:
        return (flops / 2 / rate, BACKWARD * flops / 2 / rate), (0.0, 0.0)
    scores = layout.rows * shape.heads / t * (shape.tokens / c) * shape.tokens * stack.number_bytes
    memory = cluster.hbm_gbytes_s * 1e9 / stack.elementwise
    return (flops / rate, 2 * flops / rate), tuple(count * scores / memory for count in SCORES)


def context_seconds(shape, layout, cluster, stack, attention):
    """(forward, backward) seconds that a ring of keys and values adds to attention."""
    if layout.cp == 1:
        return 0.0, 0.0
    pair = 2 * layout.rows * shape.tokens / layout.cp * shape.kv_heads * shape.head_dim
    hops = (layout.cp - 1) * exchange(
        cluster, pair / layout.tp * stack.number_bytes, layout.tp)
    return max(0.0, hops - attention[0]), max(0.0, 2 * hops - attention[1])


def head_seconds(shape, layout, cluster, stack, tp) -> float:
    """Forward and backward of the head and the loss on one microbatch."""
    n, columns = layout.rows * shape.tokens / layout.cp, shape.vocab / layout.tp
    products = sum(product_seconds(*sizes, cluster, stack) for sizes in (
        (n, columns, shape.width), (n, shape.width, columns), (columns, shape.width, n)))
    moved = LOGITS * stack.number_bytes * n * columns
    return products + moved / (cluster.hbm_gbytes_s * 1e9 / stack.elementwise) + tp


def with_gathers(shape, layout, cluster, stack, passes) -> tuple[Times, Times]:
    """(forward, input gradient) with what sharded weights add to them.

    passes: forward, whole backward, input gradient. Weights are gathered for both; gradients are
    summed behind the backward. Transfers run beside the products of neighbouring blocks, and slow
    them down. Weights that stay for the step are gathered for its first microbatch alone.
    """
    forward, backward, i = passes
    elements = shape.block_parameters / layout.tp
    gather = all_gather(
        cluster, elements * stack.number_bytes, layout.data_ranks, layout.data_stride)
    scatter = gather * stack.wire_bytes / stack.number_bytes
    often = 1.0 if layout.zero == 3 else 1 / layout.num_microbatches

    def added(moved: float, beside: float) -> float:
        exposed = max(0.0, moved - beside) if stack.overlap else moved
        return often * (exposed + SLOWED * (moved - exposed))
    return (forward._replace(gathers=added(gather, forward.total)),
            i._replace(gathers=added(gather + scatter, backward.total)))
