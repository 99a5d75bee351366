"""The memory of a rank: parameter states, the stash of its microbatches, and the rest.

The stash of a block is that of arXiv 2205.05198, extended to grouped heads and gates: inputs of
norms, of products and of the activation function, masks of dropout, and scores where they are
stored. In-flight microbatches are those of catalog.py. Letters as in shape.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mpipar.layers.costs import value
from mpipar.pipeline.instructions import parts
from mpipar.plan.cluster import Stack
from mpipar.plan.layout import (
    BY_NAME,
    Layout,
    Segment,
    blocks_of_stages,
    rank_segments,
    segments,
)
from mpipar.plan.shape import Shape

GIB = 1 << 30
AGAIN = 2.5  # a recomputed block holds its stash, and gradients in two widths besides
RESERVE = 1.75 * GIB  # contexts, libraries and buffers of collectives
STEADY = 3  # beyond this many microbatches per rank no order keeps more
BETWEEN = 0.03  # of a step's temporary arrays: memory lost to fragmentation


class Footprint(NamedTuple):
    """Bytes of the fullest rank, by label."""

    weights: float
    gradients: float
    optimizer: float
    stash: float
    buffers: float

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def reserve(self) -> float:
        """Memory outside of arrays, and fragmentation."""
        return RESERVE + BETWEEN * (self.stash + self.buffers)

    @property
    def total(self) -> float:
        return sum(self) + self.reserve


def stash_per_block(shape: Shape, layout: Layout, stack: Stack) -> dict[str, float]:
    """Return {recompute: bytes that one block keeps of one microbatch from forward to backward}.

    Other software keeps what mpipar's layers recompute from their stash. With dropout it also keeps
    a byte per masked number, and the scores after it.
    """
    size = stack.number_bytes
    sizes = shape.letters(layout.rows, layout.tp, layout.cp, size, layout.ep)
    parallel = layout.sequence_parallel
    once, stash = value(shape.costs(parallel).stream, sizes), shape.mean("stash", sizes, parallel)
    kept = stash + (0.0 if stack.remakes else shape.mean("remade", sizes, parallel))
    if stack.norm_bytes:  # replaces numbers as wide as the others
        kept += 2 * once * (stack.norm_bytes / size - 1)
    scores = 0.0
    if not stack.fused:
        scores = (shape.mean("stash", sizes, parallel, scores=True) - stash) * (2 + 1 / size)
        kept += 2 * once / size
    selected = kept * (0.6 if stack.every_other else 1)
    return {"block": once, "attention": selected, "none": kept + scores}


class Held(NamedTuple):
    """How many microbatches a rank keeps of its chunks, and of the head: F to I, and I to W."""

    waiting: int
    pending: int
    head_waiting: int
    head_pending: int


def fullest_of(schedule: str, pp: int, rank: int, m: int, chunks: int) -> tuple[Held, ...]:
    """Return what a rank's order keeps, dropping states that another one exceeds in all parts."""
    family = BY_NAME[schedule]
    program = family.order(pp, rank, m, *(chunks, pp) if family.looped else ())
    found, here, head = set(), [0, 0], [0, 0]
    for instr in program:
        for kind, stage, _ in parts(instr):
            for own in (here, head)[: 1 + (stage == pp * chunks - 1)]:
                own[0] += (kind == "F") - (kind in "IB")
                own[1] += (kind == "I") - (kind == "W")
        found.add((*head, *here))
    fullest: list[Held] = []
    for head_waiting, head_pending, waiting, pending in sorted(found, reverse=True):
        one = Held(waiting, pending, head_waiting, head_pending)
        if not fullest or fullest[-1][2:] != one[2:] or pending > fullest[-1].pending:
            fullest.append(one)
    return tuple(fullest)


Orders = Callable[[str, int, int, int, int], tuple[Held, ...]]  # fullest_of, which may be cached


def in_flight(layout: Layout, rank: int, orders: Orders) -> tuple[Held, ...]:
    """Return what a pipeline rank may keep at its fullest, by its order of passes.

    One of these is the fullest, whatever a chunk keeps from F to I and from I to W.
    """
    m = min(layout.num_microbatches, STEADY * layout.pp)
    return orders(layout.schedule, layout.pp, rank, m, layout.chunks)


def footprint(shape: Shape, layout: Layout, stack: Stack) -> Footprint:
    """Return the memory of the fullest rank of a layout with equally many blocks on each stage."""
    counts = blocks_of_stages(shape.layers, layout.stages)
    ranks = fullest_ranks(layout, counts)
    return max(rank_footprints(shape, layout, stack, counts, ranks), key=lambda one: one.total)


def fullest_ranks(
    layout: Layout, counts: tuple[int, ...], kinds: Sequence[object] = ()
) -> list[int]:
    """Return pipeline ranks that include the fullest of each kind. kinds: of each rank; or one.

    These are the ends, which have tables, and the first and last rank of each number of blocks:
    between them, what is kept rises or falls along the pipeline.
    """
    last = layout.pp - 1
    if not kinds and min(counts) == max(counts):
        return sorted({0, min(1, last), max(last - 1, 0), last})
    same: dict[tuple, list[int]] = {}
    for rank in range(1, last):
        kind = id(kinds[rank]) if kinds else 0
        same.setdefault((kind, layout.blocks_of(rank, counts)), []).append(rank)
    return sorted({0, last, *(ranks[end] for ranks in same.values() for end in (0, -1))})


def most_blocks(
    shape: Shape, layout: Layout, stack: Stack, gib: Sequence[float], kept: Kept | None = None
) -> list[int]:
    """Return the most blocks that each pipeline rank has room for; a rank has one stage.

    gib: memory that each rank may use. Memory grows with the blocks by no more than it does first.
    kept: of the layout, if it is known.
    """
    kept = kept or Kept.of(shape, layout, stack)
    last = layout.pp - 1
    ends = list(dict.fromkeys((0, min(1, last), last)))
    empty = dict(
        zip(ends, rank_footprints(shape, layout, stack, (0,) * layout.pp, ends, kept), strict=True)
    )
    states = sum(states_of(segments(shape, layout, 1), layout, stack))
    return [
        int(
            (gib[rank] * GIB - empty.get(rank, empty[ends[1]]).total)
            // (states + (1 + BETWEEN) * kept.most(layout, rank, 1))
        )
        for rank in range(layout.pp)
    ]


class Kept(NamedTuple):
    """Bytes that a microbatch keeps of a block and of the head, each from F to I and from I to W.

    work: temporary memory while a block runs. orders: tell how many microbatches wait.
    """

    block: tuple[float, float]
    head: tuple[float, float]
    work: float
    orders: Orders

    @classmethod
    def of(cls, shape: Shape, layout: Layout, stack: Stack, orders: Orders = fullest_of) -> Kept:
        """Return what is kept: for mpipar as its layers declare, for other software the whole
        stash.

        Other software does not tell what W needs. What W needs is kept whether or not the block is
        recomputed.
        """
        stash = stash_per_block(shape, layout, stack)
        own = stash[layout.recompute]
        if not stack.remakes:
            again = (AGAIN - 1) * stash["attention"] - own + stash["none"]
            return cls(
                (own, own), (0.0, 0.0), again if layout.recompute == "block" else 0.0, orders
            )
        sizes = shape.letters(layout.rows, layout.tp, layout.cp, stack.number_bytes, layout.ep)
        late, head = (
            shape.mean("kept", sizes, layout.sequence_parallel),
            shape.costs(layout.sequence_parallel).head,
        )
        return cls(
            (own, late),
            (value(head.stash, sizes), value(head.kept, sizes)),
            stash["none"] + (late if layout.recompute == "block" else 0.0),
            orders,
        )

    def most(self, layout: Layout, rank: int, blocks: float) -> float:
        """Return the bytes that a rank with `blocks` blocks keeps at its fullest."""
        each = blocks / layout.chunks
        return max(
            each * (one.waiting * self.block[0] + one.pending * self.block[1])
            + one.head_waiting * self.head[0]
            + one.head_pending * self.head[1]
            for one in in_flight(layout, rank, self.orders)
        )


def states_of(own: list[Segment], layout: Layout, stack: Stack) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer of some segments."""
    elements = sum(one.elements for one in own)
    pieces = sum(one.elements / one.ranks for one in own)
    return (
        (pieces if layout.zero >= 3 else elements) * stack.weight_bytes,
        (pieces if layout.zero >= 2 else elements) * stack.gradient_bytes,
        (pieces if layout.zero else elements) * stack.optimizer_bytes,
    )


def rank_footprints(
    shape: Shape,
    layout: Layout,
    stack: Stack,
    counts: tuple[int, ...],
    ranks: Iterable[int],
    kept: Kept | None = None,
) -> list[Footprint]:
    """Return the memory of some pipeline ranks.

    counts: blocks of each stage. kept: of the layout, if it is known.
    """
    kept = kept or Kept.of(shape, layout, stack)
    return [_rank_footprint(shape, layout, stack, rank, counts, kept) for rank in ranks]


def _rank_footprint(
    shape: Shape, layout: Layout, stack: Stack, rank: int, counts: tuple[int, ...], kept: Kept
) -> Footprint:
    size, tables = stack.number_bytes, layout.tables_of(rank)
    own, has_head = rank_segments(shape, layout, rank, counts), rank == layout.last_rank
    tokens = layout.rows * shape.tokens / layout.cp
    held = (
        kept.most(layout, rank, layout.blocks_of(rank, counts))
        + size * tokens * shape.width * tables
    )
    buffers, logits = kept.work, has_head * tokens * shape.vocab / layout.tp
    if stack.remakes:  # logits are part of the head's stash, and freed when a block runs
        buffers = max(0.0, buffers - logits * size)
    else:
        buffers += (stack.logit_bytes + size) * logits
    if layout.zero >= 3:
        block = sum(one.elements for one in segments(shape, layout, stack.unit))
        table = shape.vocab * shape.width / layout.tp
        second, first = sorted([block, block, *[table] * tables])[-2:]
        buffers += (first + second) * size + first * stack.gradient_bytes
    elif layout.zero == 2:
        buffers += sum(one.elements for one in own) * size
    return Footprint(*states_of(own, layout, stack), held, buffers)
