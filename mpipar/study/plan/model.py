"""The time of a step: matmuls, attention and memory traffic, barriers, bubble, sums, update.

A matmul takes a start, its FLOPs over one rate and its bytes over another; all else of a block
crosses memory a counted number of times; a pass takes as long as its kernels or their launches,
whichever is longer. What is sent beside a window of computing slows it down, and what does not fit
is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from mpipar import models
from mpipar.config.sections import Config
from mpipar.errors import UsageError
from mpipar.pipeline.schedules.catalog import FAMILIES
from mpipar.run.data.rows import rows_per_microbatch
from mpipar.study.plan.job import STACKS, Layout, Segment, Shape, Stack, segments
from mpipar.study.plan.machine import Machine
from mpipar.study.schedules.forms import FORMS, Letters
from mpipar.study.schedules.simulate import Costs, simulate
from mpipar.train.build import configured_schedule

# How often an activation crosses memory outside matmuls, forward and backward: two norms and two
# residual sums with dropout; the activation function; the copies of q, k and v; routed tokens.
STREAM, WIDE, HEADS, ROUTED = (10, 12), (2, 3), (3, 4), (4, 6)
SCORES = (4, 5)  # scale, mask, softmax and dropout over scores stored in memory
LOGITS = 10  # how often a loss moves each logit, forward and backward
BACKWARD = 2.5  # FLOPs of fused attention, backward over forward: scores are recomputed
SLOWED = 0.5  # seconds that computing loses per second of what is sent beside it: chosen on steps
SUM_OF_PARTS = 1.2  # time of reduce-scatter + all-gather over one all-reduce of the same bytes
BARRIER = 0.07  # launch of a barrier over launches of a block's forward: chosen on steps
UNALIGNED = 2.5  # time of a matmul over a vocabulary that is no multiple of 8: chosen on steps
BEYOND = 2.0  # points of MFU by which a plan may exceed the best measured step of its device


class Pass(NamedTuple):
    """Seconds of one or more passes. waits: by how much launches outlast what they launch."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    gathers: float = 0.0
    waits: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def launched(self, seconds: float) -> Pass:
        """Return the pass, which takes no less than its launches."""
        return self._replace(waits=max(0.0, seconds - self.total))

    def times(self, many: float) -> Pass:
        """Return `many` of these passes."""
        return Pass(*(many * part for part in self))

    def plus(self, *others: Pass) -> Pass:
        """Return the passes together."""
        return Pass(*map(sum, zip(self, *others, strict=True)))


class Step(NamedTuple):
    """Seconds of a step by part, on its busiest pipeline rank; they add up to `total`.

    capped: what is added because no measured step of the device is faster.
    """

    products: float
    attention: float
    elementwise: float
    waits: float
    again: float
    tp: float
    cp: float
    ep: float
    bubble: float
    hops: float
    sums: float
    update: float
    capped: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def modelled(self) -> float:
        """What the model says, which may be faster than any measured step: to rank layouts by."""
        return self.total - self.capped


class Block(NamedTuple):
    """The passes of a block. again: what recomputation repeats. head: all its passes."""

    f: Pass
    i: Pass
    w: Pass
    again: Pass
    head: Pass


class Rates:
    """What a stack reaches on a machine: FLOPs and bytes per second."""

    def __init__(self, machine: Machine, stack: Stack):
        constants = stack.on(machine)
        self.machine, self.number = machine, stack.number_bytes
        self.product = min(machine.ceiling_tflops, machine.product_tflops * constants.products)
        self.attention = min(machine.ceiling_tflops, machine.attention_tflops * constants.attention)
        self.memory = machine.hbm_gbytes_s * 1e9 / constants.elementwise
        self.start = constants.starts_us * 1e-6

    def matmul(self, m: float, k: float, n: float, matrices: float = 1) -> float:
        """Return the seconds of (m, k) x (k, n); matrices: that share the m rows."""
        machine, numbers = self.machine, m * k + matrices * k * n + m * n
        return (
            machine.product_us * 1e-6
            + 2 * m * k * n / (self.product * 1e12)
            + self.number * numbers / (machine.product_gbytes_s * 1e9)
        )


def beside(moved: float, window: float, overlap: bool = True) -> float:
    """Return the seconds that sending adds to a window of computing, which it slows down."""
    out = max(0.0, moved - window) if overlap else moved
    return out + SLOWED * (moved - out)


def block_of(
    shape: Shape,
    layout: Layout,
    machine: Machine,
    stack: Stack,
    known: dict[Layout, Block] | None = None,
) -> Block:
    """Return the passes of a block on one microbatch, averaged over all blocks, and of the head.

    known: passes without gathers, by `Layout.of_passes`, to which missing ones are added.
    """
    known, alike = {} if known is None else known, layout.of_passes
    if alike not in known:
        known[alike] = passes_of(shape, alike, machine, stack)
    block = known[alike]
    return gathered(shape, layout, machine, stack, block) if layout.zero == 3 else block


def passes_of(shape: Shape, layout: Layout, machine: Machine, stack: Stack) -> Block:
    """Return the passes of a block without gathers. layout: see `Layout.of_passes`."""
    rates, e, tp = Rates(machine, stack), stack.number_bytes, layout.tp
    n = layout.rows * shape.seq_len / layout.cp
    q, kv = (count * shape.head_dim / tp for count in (shape.heads, shape.kv_heads))
    width, gates = shape.d_model, shape.gates

    ffns = [(1 - shape.expert_share, n, shape.ffn / tp, 1.0)]  # share, rows, width, matrices
    if shape.experts:
        local, rows = shape.experts / layout.ep, n * shape.experts_per_token
        ffns.append((shape.expert_share, rows, shape.expert_ffn / tp, local))
        if shared := shape.shared_expert_ffn:
            ffns.append((shape.expert_share, n, shared / tp, 1.0))
    matmuls = [(1.0, n, width, q + 2 * kv, 1.0), (1.0, n, q, width, 1.0)]
    for share, rows, f, many in ffns:
        matmuls += [(share, rows, width, gates * f, many), (share, rows, f, width, many)]
    forward = sum(s * rates.matmul(m, k, o, x) for s, m, k, o, x in matmuls if s)
    weights = sum(s * rates.matmul(k, m, o, x) for s, m, k, o, x in matmuls if s)

    flops = 4 * n * shape.seq_len * q
    if stack.fused:
        attention = flops / 2 / (rates.attention * 1e12)
        scores, backwards = (0.0, 0.0), BACKWARD
    else:
        stored = e * n * shape.seq_len * shape.heads / tp
        attention = flops / (rates.product * 1e12) + 2 * stored / (machine.product_gbytes_s * 1e9)
        scores, backwards = tuple(many * stored / rates.memory for many in SCORES), 2.0

    stream = e * n * width / (tp if layout.sequence_parallel else 1)
    widened = e * sum(share * rows * gates * f for share, rows, f, _ in ffns)
    routed = e * shape.expert_share * n * shape.experts_per_token * width
    elementwise = [
        (a * stream + b * widened + c * e * n * q + d * routed) / rates.memory
        for a, b, c, d in zip(STREAM, WIDE, HEADS, ROUTED, strict=True)
    ]
    barriers = 2 * machine.all_reduce(e * n * width, tp)
    barriers *= SUM_OF_PARTS if layout.sequence_parallel else 1
    exchange = 2 * machine.all_to_all(routed, layout.ep, layout.data_stride)
    hop, pieces = machine.message(2 * e * n * kv, tp), ((1, attention), (2, backwards * attention))
    rings = [(layout.cp - 1) * beside(many * hop, one / layout.cp) for many, one in pieces]

    plain = [
        Pass(
            forward, one * attention, elementwise[way] + scores[way], barriers, rings[way], exchange
        )
        for way, one in enumerate((1.0, backwards))
    ]
    launches = rates.start * (1 + 2 * BARRIER * (tp > 1))
    f, i = (one.launched(launches) for one in plain)
    adding = 2 * stack.gradient_bytes * shape.block_parameters / tp / (machine.hbm_gbytes_s * 1e9)
    w = Pass(
        weights,
        elementwise=adding if layout.zero < 3 else 0.0,
        tp=SLOWED * barriers / 2 if layout.sequence_parallel else 0.0,
    ).launched(rates.start)

    selective = Pass(attention=0.0 if stack.fused else attention, elementwise=scores[0])
    if stack.fused and stack.every_other:
        selective = Pass(forward / 2, elementwise=elementwise[0])
    again = {"none": Pass(), "attention": selective, "block": f}[layout.recompute]
    head = head_of(shape, layout, stack, rates, n)._replace(tp=barriers if tp > 1 else 0.0)
    return Block(f, i, w, again, head)


def head_of(shape: Shape, layout: Layout, stack: Stack, rates: Rates, n: float) -> Pass:
    """Return all passes of the head over n tokens, and of the loss."""
    vocab = shape.vocab_size / layout.tp
    odd = not stack.pads and vocab % 1 == 0 and vocab % 8
    matmuls = 2 * rates.matmul(n, shape.d_model, vocab) + rates.matmul(shape.d_model, n, vocab)
    loss = LOGITS * stack.number_bytes * n * vocab / rates.memory
    return Pass((UNALIGNED if odd else 1.0) * matmuls, elementwise=loss).launched(rates.start)


def gathered(shape: Shape, layout: Layout, machine: Machine, stack: Stack, block: Block) -> Block:
    """Return the passes with what sharded weights add: gathers, and sums of their gradients."""
    own = segments(shape, layout, 1.0)
    gather = over_all(machine.all_gather, own, stack.number_bytes)
    sums = over_all(machine.all_gather, own, stack.sum_bytes)  # a reduce-scatter takes as long
    backward = block.i.total + block.w.total + block.again.total
    return block._replace(
        f=block.f._replace(gathers=beside(gather, block.f.total, stack.overlap)),
        i=block.i._replace(gathers=beside(gather + sums, backward, stack.overlap)),
    )


def over_all(
    collective: Callable[[float, int, int], float], own: list[Segment], number_bytes: float
) -> float:
    """Return the seconds of a collective (bytes, ranks, stride) on each of these segments."""
    return sum(collective(one.elements * number_bytes, one.ranks, one.stride) for one in own)


def step_time(
    shape: Shape,
    layout: Layout,
    machine: Machine,
    stack: Stack,
    block: Block | None = None,
    pipeline: float | None = None,
) -> Step:
    """Return the step of a layout.

    block: its passes, if known. pipeline: seconds of all passes, if a simulator knows them.
    """
    block = block or block_of(shape, layout, machine, stack)
    m, blocks = layout.num_microbatches, layout.blocks_by_rank(shape.layers)
    each = block.f.plus(block.i, block.w)
    busy = [m * (each.total + block.again.total) * count for count in blocks]
    busy[layout.last_rank] += m * block.head.total
    rank = max(range(layout.pp), key=busy.__getitem__)
    passes = closed(shape, layout, block, busy) if pipeline is None else pipeline
    copies = 1 if shape.tied or layout.pp > 1 else 2
    held = segments(shape, layout, max(blocks), shape.d_model * shape.vocab_size * copies)
    if layout.zero == 3:  # gathers of blocks are in their passes; the tables are units, too
        nbytes = shape.table_parameters * stack.number_bytes / layout.tp
        sums = m * machine.all_gather(nbytes, layout.data_ranks, layout.data_stride)
    else:
        sums = sum_seconds(layout, machine, stack, block, held, max(blocks))
    own = each.times(m * blocks[rank]).plus(block.head.times(m * (rank == layout.last_rank)))
    step = Step(
        *own[:3],
        own.waits,
        m * blocks[rank] * block.again.total,
        own.tp,
        own.cp,
        own.ep,
        max(0.0, passes - busy[rank]),
        hop_seconds(shape, layout, machine, stack),
        own.gathers + sums,
        update_seconds(layout, machine, stack, held),
    )
    return capped(shape, layout, machine, step)


def capped(shape: Shape, layout: Layout, machine: Machine, step: Step) -> Step:
    """Return the step, which is not promised to use more of the device than was ever measured."""
    flops = shape.step_flops(layout.dp * layout.rows * layout.num_microbatches)
    most = (machine.best_mfu + BEYOND) / 100 if machine.best_mfu else math.inf
    least = flops / (most * layout.ranks * machine.peak_tflops[machine.dtype_16] * 1e12)
    return step._replace(capped=max(0.0, least - step.total))


def closed(shape: Shape, layout: Layout, block: Block, busy: list[float]) -> float:
    """Return the seconds of all passes in closed form: a rank computes, and waits for others.

    With a split backward the last rank does not set the pace: all have the same gap somewhere.
    """
    m, again = layout.num_microbatches, block.i.total + block.again.total
    letters = Letters(2, m, 1, block.f.total, again, block.w.total)
    bubble = FORMS[layout.schedule].bubble
    each, counts = bubble.value(letters), layout.blocks_of(shape.layers)
    waits = [before * each for before in accumulate(counts[: layout.pp - 1], initial=0)]
    if layout.family.split:
        waits = [waits[-1]] * layout.pp
    return max(wait + own for wait, own in zip(waits, busy, strict=True))


def hop_seconds(shape: Shape, layout: Layout, machine: Machine, stack: Stack) -> float:
    """Return the exposed seconds of messages between stages, down once and up once.

    Those inside nodes are counted only if there are no others. A stack without overlap also waits
    for those of each chunk and microbatch.
    """
    if layout.pp == 1:
        return 0.0
    tokens, node = layout.rows * shape.seq_len / layout.cp, machine.per_node
    nodes = -(-layout.pp * layout.stage_stride // node)
    away = max(layout.stage_stride, node) if nodes > 1 else layout.stage_stride
    hop = machine.message(tokens * shape.d_model * stack.number_bytes / layout.tp, away)
    seconds = 2 * min(layout.stages - 1, max(1, layout.chunks * nodes - 1)) * hop
    return seconds if stack.overlap else seconds + layout.num_microbatches * layout.chunks * hop


def sum_seconds(
    layout: Layout, machine: Machine, stack: Stack, block: Block, own: list[Segment], blocks: int
) -> float:
    """Return the seconds of sums of a rank's segments that no window of computing hides."""
    window = max(0, blocks - 1)  # the last block's gradients find nothing to hide beside
    backward = window * (block.i.total + block.w.total + block.again.total)
    if layout.zero == 0:
        sums = over_all(machine.all_reduce, own, stack.sum_bytes)
        return beside(sums, backward, stack.overlap)
    sums = over_all(machine.all_gather, own, stack.sum_bytes)  # a reduce-scatter takes as long
    weights = over_all(machine.all_gather, own, stack.number_bytes)
    forward = beside(weights, window * block.f.total, stack.overlap)
    return beside(sums, backward, stack.overlap) + forward


def update_seconds(layout: Layout, machine: Machine, stack: Stack, own: list[Segment]) -> float:
    """Return the seconds of the update of a rank's segments: bytes over the rate of memory.

    A gradient is cleared, read for the norm, and read again; the optimizer's numbers are read and
    written, and the weight is written.
    """
    elements = sum(one.elements / (one.ranks if layout.zero else 1) for one in own)
    moved = 3 * stack.gradient_bytes + 2 * stack.optimizer_bytes + stack.weight_bytes
    return elements * moved / (machine.hbm_gbytes_s * 1e9)


# --- the step of a run's own configuration


def step_of(config: Config, machine: Machine) -> Step:
    """Return the step of a resolved config, in the order of its own schedule.

    Raises UsageError for a number format that the machine has no rate for.
    """
    dtype, grid, memory = config.run.dtype, config.grid, config.memory
    if dtype not in machine.peak_tflops:
        raise UsageError(
            f"--dtype {dtype}: {machine.name} has no rate for it; use one of"
            f" {', '.join(machine.peak_tflops)}"
        )
    machine, stack = machine.with_dtype(dtype), STACKS["mpipar"].with_dtype(dtype)
    schedule, shape = configured_schedule(grid), Shape.of(config.model)
    layout = Layout(
        grid.island_dp,
        grid.pp,
        grid.cp,
        grid.tp,
        rows_per_microbatch(config),
        grid.num_microbatches,
        schedule.name if schedule.name in FAMILIES else "1f1b",
        schedule.num_stages // grid.pp,
        config.model.sequence_parallel,
        memory.recompute,
        memory.zero,
        grid.rank_order.partition(",")[0],
        grid.ep,
    )
    block = block_of(shape, layout, machine, stack)
    head, counts = block.head.total / 3, models.layer_split(config, schedule)
    passes = (block.f.total, block.i.total + block.again.total, block.w.total)
    costs = Costs(
        *(
            tuple(
                count * one + head * (stage == len(counts) - 1)
                for stage, count in enumerate(counts)
            )
            for one in passes
        )
    )
    seconds = float(simulate(schedule, costs).makespan)
    step = step_time(shape, layout, machine, stack, block, seconds)
    meeting = meeting_seconds(shape, layout, machine, grid.islands or 1)
    return step._replace(sums=step.sums + meeting / (config.train.outer_interval or 1))


def meeting_seconds(shape: Shape, layout: Layout, machine: Machine, islands: int) -> float:
    """Return the seconds of the sum of float32 weights over islands. layout: of one of them."""
    return sum(machine.all_reduce(4 * one, islands, layout.ranks) for one in met(shape, layout))


def met(shape: Shape, layout: Layout) -> list[float]:
    """Return how many numbers of each segment a rank sums over islands: its piece with --zero."""
    blocks = max(layout.blocks_by_rank(shape.layers))
    held = segments(shape, layout, blocks, shape.table_parameters)
    return [one.elements / (one.ranks if layout.zero else 1) for one in held]
