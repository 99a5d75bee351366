"""How much memory a rank needs: states of its parameters, stash of its microbatches, and the rest.

The stash of a block is that of arXiv 2205.05198, with the widths of grouped heads and of a gate. It
has inputs of norms, of products and of the activation function, masks of dropout, and scores where
they lie in memory. In-flight microbatches are those of closed_form.py. Letters as in shape.py.
"""

from __future__ import annotations

from typing import NamedTuple

from mpipar.pipeline.closed_form import PEAKS, Counts
from mpipar.plan.cluster import Stack
from mpipar.plan.layout import STANDS_FOR, Layout, blocks_of_stages, rank_parameters
from mpipar.plan.shape import Shape

GIB = 1 << 30
AGAIN = 2.5  # a block that runs again holds what it keeps, and gradients beside it, in two widths
LOGITS = 4  # bytes of a logit; its gradient has a number's
RESERVE = 1.75 * GIB  # contexts, libraries and buffers of collectives, and what lies between arrays


class Footprint(NamedTuple):
    """Bytes of the fullest rank, by label."""

    weights: float
    gradients: float
    optimizer: float
    stash: float
    buffers: float

    @property
    def total(self) -> float:
        return sum(self) + RESERVE


def stash_per_block(shape: Shape, layout: Layout, stack: Stack, recompute: str) -> float:
    """Bytes that one block keeps of one microbatch from its forward to its backward."""
    t, width, size = layout.tp, shape.width, stack.number_bytes
    n = layout.rows * shape.tokens / layout.cp
    stream = n * width / (t if layout.sequence_parallel else 1)
    if recompute == "block":
        return size * stream
    # Inputs of two norms and of two products, and where there is dropout, its two masks.
    kept = (4 * size + (0 if stack.fused else 2)) * stream
    kept += size * n * (shape.qkv + shape.attended) / t
    kept += size * n * (shape.up + shape.ffn) / t
    if recompute == "attention":
        return kept * stack.selective
    if not stack.fused:
        # Scores before and after dropout, and its mask.
        scores = layout.rows * shape.heads / t * (shape.tokens / layout.cp) * shape.tokens
        kept += (2 * size + 1) * scores
    return kept


def in_flight(layout: Layout, rank: int) -> int:
    """The most chunks of which a rank of the pipeline keeps something at once."""
    name = STANDS_FOR.get(layout.schedule, layout.schedule)
    if layout.chunks > 1 and name == "1f1b":
        name = "interleaved"
    m = layout.num_microbatches
    first = -(-m // max(1, m // layout.pp))  # of `group_sizes`, which a huge m makes long
    counts = Counts(layout.pp, m, layout.chunks, first)
    peak = PEAKS[name].value(counts)
    # Later ranks of a pipeline that starts its backwards early hold fewer.
    return max(1, peak - rank) if name in ("1f1b", "interleaved") else peak


def footprint(shape: Shape, layout: Layout, stack: Stack) -> Footprint:
    """The memory of the fullest rank of a layout."""
    counts = blocks_of_stages(shape.layers, layout.stages)
    return max((rank_footprint(shape, layout, stack, rank, counts)
                for rank in dict.fromkeys((0, min(1, layout.pp - 1), layout.pp - 1))),
               key=lambda found: found.total)


def rank_footprint(shape, layout, stack, rank: int, counts) -> Footprint:
    """The memory of one rank of the pipeline."""
    blocks, size = layout.blocks_of(rank, counts), stack.number_bytes
    ends = (rank == 0) + (rank == layout.last_rank)
    elements = rank_parameters(shape, layout, rank, counts)
    shards, whole = layout.data_ranks, layout.data_ranks if layout.zero >= 3 else 1
    unit = max(stack.unit * shape.block_parameters, shape.vocab * shape.width) / layout.tp
    tokens = layout.rows * shape.tokens / layout.cp
    kept = stash_per_block(shape, layout, stack, layout.recompute)
    blocks_held = in_flight(layout, rank) * blocks / layout.chunks
    buffers = 0.0
    if layout.recompute == "block":
        without_scores = stash_per_block(shape, layout, stack, "attention")
        buffers = (AGAIN - 1) * without_scores - kept + stash_per_block(
            shape, layout, stack, "none")
    if rank == layout.last_rank:
        buffers += (LOGITS + size) * tokens * shape.vocab / layout.tp
    if layout.zero >= 3:
        buffers += 2 * unit * size + unit * stack.gradient_bytes
    elif layout.zero == 2:
        buffers += elements * size
    return Footprint(
        elements * stack.weight_bytes / whole,
        elements * stack.gradient_bytes / (shards if layout.zero >= 2 else 1),
        elements * stack.optimizer_bytes / (shards if layout.zero else 1),
        blocks_held * kept + size * tokens * shape.width * ends, buffers)
