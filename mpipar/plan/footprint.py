"""How much memory a rank needs: states of its parameters, stash of its microbatches, and the rest.

The stash of a block is that of arXiv 2205.05198, with the widths of grouped heads and of a gate. It
has inputs of norms, of products and of the activation function, masks of dropout, and scores where
they lie in memory. In-flight microbatches are those of catalog.py. Letters as in shape.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpipar.layers.costs import value
from mpipar.pipeline.forms import Letters
from mpipar.plan.cluster import Stack
from mpipar.plan.layout import Layout, Segment, blocks_of_stages, rank_segments, segments
from mpipar.plan.shape import Shape

GIB = 1 << 30
AGAIN = 2.5  # a block that runs again holds what it keeps, and gradients beside it, in two widths
RESERVE = 1.75 * GIB  # contexts, libraries and buffers of collectives
BETWEEN = 0.03  # of what comes and goes in a step: memory that lies unused between arrays


class Footprint(NamedTuple):
    """Bytes of the fullest rank, by label."""

    weights: float
    gradients: float
    optimizer: float
    stash: float
    buffers: float

    @property
    def reserve(self) -> float:
        """What no array has, and what lies between arrays."""
        return RESERVE + BETWEEN * (self.stash + self.buffers)

    @property
    def total(self) -> float:
        return sum(self) + self.reserve


def stash_per_block(shape: Shape, layout: Layout, stack: Stack) -> dict[str, float]:
    """{recompute: bytes that one block keeps of one microbatch from forward to backward}.

    What layers here make again from their stash, other software keeps. Where there is dropout, it
    also keeps a byte of each masked number, and scores after it.
    """
    size = stack.number_bytes
    sizes = shape.letters(layout.rows, layout.tp, layout.cp, size, layout.ep)
    parallel = layout.sequence_parallel
    once, stash = value(shape.costs(parallel).stream, sizes), shape.mean("stash", sizes, parallel)
    kept = stash + (0.0 if stack.remakes else shape.mean("remade", sizes, parallel))
    if stack.norm_bytes:  # in place of numbers as wide as others
        kept += 2 * once * (stack.norm_bytes / size - 1)
    scores = 0.0
    if not stack.fused:
        scores = (shape.mean("stash", sizes, parallel, scores=True) - stash) * (2 + 1 / size)
        kept += 2 * once / size
    selected = kept * (0.6 if stack.every_other else 1)
    return {"block": once, "attention": selected, "none": kept + scores}


def in_flight(layout: Layout, rank: int) -> int:
    """The most chunks of which a rank of the pipeline keeps something at once."""
    family = layout.family
    peak = family.peak.value(Letters(layout.pp, layout.num_microbatches, layout.chunks))
    return max(1, peak - rank) if family.early else peak


def footprint(shape: Shape, layout: Layout, stack: Stack) -> Footprint:
    """The memory of the fullest rank of a layout with as many blocks on each stage."""
    counts = blocks_of_stages(shape.layers, layout.stages)
    ranks = fullest_ranks(layout, counts)
    return max(rank_footprints(shape, layout, stack, counts, ranks), key=lambda one: one.total)


def fullest_ranks(layout: Layout, counts: tuple[int, ...],
                  kinds: Sequence[object] = ()) -> list[int]:
    """Pipeline ranks of which one is the fullest of its kind. kinds: of each rank, one without.

    They are the ends, which have tables, and of each number of blocks the first one behind.
    """
    last = layout.pp - 1
    if not kinds and min(counts) == max(counts):
        return list(dict.fromkeys((0, min(1, last), last)))
    first: dict[tuple, int] = {}
    for rank in range(1, last):
        kind = id(kinds[rank]) if kinds else 0
        first.setdefault((kind, layout.blocks_of(rank, counts)), rank)
    return list(dict.fromkeys((0, last, *first.values())))


def most_blocks(shape: Shape, layout: Layout, stack: Stack, gib: Sequence[float]) -> list[int]:
    """The most blocks that each pipeline rank has room for; a rank has one stage.

    gib: memory that each rank may use. Memory grows evenly with the blocks.
    """
    none, last = (0,) * layout.pp, layout.pp - 1
    kept = stash_per_block(shape, layout, stack)[layout.recompute] * (1 + BETWEEN)
    ends = list(dict.fromkeys((0, min(1, last), last)))
    empty = dict(zip(ends, rank_footprints(shape, layout, stack, none, ends), strict=True))
    states = sum(states_of(segments(shape, layout, 1), layout, stack))
    return [int((gib[rank] * GIB - empty.get(rank, empty[ends[1]]).total)
                // (states + in_flight(layout, rank) * kept)) for rank in range(layout.pp)]


def states_of(own: list[Segment], layout: Layout, stack: Stack) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer of some segments."""
    elements = sum(one.elements for one in own)
    pieces = sum(one.elements / one.ranks for one in own)
    return ((pieces if layout.zero >= 3 else elements) * stack.weight_bytes,
            (pieces if layout.zero >= 2 else elements) * stack.gradient_bytes,
            (pieces if layout.zero else elements) * stack.optimizer_bytes)


def rank_footprints(shape: Shape, layout: Layout, stack: Stack, counts: tuple[int, ...],
                    ranks: Iterable[int]) -> list[Footprint]:
    """The memory of some ranks of the pipeline. counts: blocks of each stage."""
    stash = stash_per_block(shape, layout, stack)
    return [_rank_footprint(shape, layout, stack, rank, counts, stash) for rank in ranks]


def _rank_footprint(shape, layout, stack, rank: int, counts, stash) -> Footprint:
    blocks, size = layout.blocks_of(rank, counts), stack.number_bytes
    ends = (rank == 0) + (rank == layout.last_rank)
    own = rank_segments(shape, layout, rank, counts)
    block = sum(one.elements for one in segments(shape, layout, stack.unit))
    unit = max(block, shape.vocab * shape.width / layout.tp)
    tokens = layout.rows * shape.tokens / layout.cp
    kept = stash[layout.recompute]
    blocks_held = in_flight(layout, rank) * blocks / layout.chunks
    buffers = 0.0
    if layout.recompute == "block":
        buffers = (AGAIN - 1) * stash["attention"] - kept + stash["none"]
    if rank == layout.last_rank:
        buffers += (stack.logit_bytes + size) * tokens * shape.vocab / layout.tp
    if layout.zero >= 3:
        buffers += 2 * unit * size + unit * stack.gradient_bytes
    elif layout.zero == 2:
        buffers += sum(one.elements for one in own) * size
    return Footprint(*states_of(own, layout, stack),
                     blocks_held * kept + size * tokens * shape.width * ends, buffers)
