"""The memory of a rank in closed form: parameter states, the stash of its microbatches, the rest.

The stash of a block is that of arXiv 2205.05198, extended to grouped heads and gates: inputs of
norms, of matmuls and of the activation function, masks of dropout, and scores where they are
stored. `confirm` in report.py asks mpipar's own step on shapes instead. Letters as in job.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mpipar.pipeline.instructions import parts
from mpipar.plan.job import BY_NAME, Layout, Shape, Stack, segments

GIB = 1 << 30
AGAIN = 2.5  # a recomputed block holds its stash, and gradients in two widths besides
RESERVE = 1.75 * GIB  # contexts, libraries and buffers of collectives
STEADY = 3  # beyond this many microbatches per rank no order keeps more
BETWEEN = 0.03  # of a step's temporary arrays: memory lost to fragmentation


class Memory(NamedTuple):
    """Bytes of a rank, by label."""

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


class Stash(NamedTuple):
    """Bytes of one microbatch in one block: kept until backward, and needed while it runs again."""

    kept: float
    again: float


def stash_of(shape: Shape, layout: Layout, stack: Stack) -> Stash:
    """Return what a block keeps of a microbatch from forward to backward.

    Without recomputation: what norms, matmuls and the activation function read. Software with
    dropout also keeps scores, and a byte for each masked number.
    """
    e, tp, n = stack.number_bytes, layout.tp, layout.rows * shape.tokens / layout.cp
    once = e * n * shape.width / (tp if layout.sequence_parallel else 1)
    q, kv = (count * shape.head_dim / tp for count in (shape.heads, shape.kv_heads))
    share, k, gates = shape.expert_share, shape.experts_per_token, shape.gates
    dense = (1 - share) * shape.ffn + share * shape.shared_ffn
    wide = (gates + 1) * (dense + share * k * shape.expert_ffn) / tp
    kept = 4 * once + e * n * (2 * q + 2 * kv + wide + share * k * shape.width)
    if stack.norm_bytes:  # replaces numbers as wide as the others
        kept += 2 * once * (stack.norm_bytes / e - 1)
    scores = 0.0
    if not stack.fused:
        scores = n * shape.tokens * shape.heads / tp * (2 * e + 1)
        kept += 2 * once / e
    own = {
        "block": once,
        "attention": kept * (0.6 if stack.every_other else 1),
        "none": kept + scores,
    }[layout.recompute]
    again = AGAIN * kept - own + scores if layout.recompute == "block" else 0.0
    return Stash(own, max(0.0, again))


def in_flight(schedule: str, pp: int, chunks: int, rank: int, m: int) -> int:
    """Return how many microbatches of a stage a rank keeps at its fullest, by its order of passes.

    A split backward keeps one until its weight gradient.
    """
    family = BY_NAME[schedule]
    m = min(m, STEADY * pp)
    held = most = 0
    for instr in family.order(pp, rank, m, *(chunks,) if family.looped else ()):
        for kind, _, _ in parts(instr):
            held += (kind == "F") - (kind == ("W" if family.split else "I")) - (kind == "B")
        most = max(most, held)
    return most


def memory_of(
    shape: Shape, layout: Layout, stack: Stack, rank: int, blocks: int, stash: Stash, flight: int
) -> Memory:
    """Return the memory of a pipeline rank of so many blocks. flight: see `in_flight`."""
    e, tp, tables = stack.number_bytes, layout.tp, layout.tables_of(rank)
    tokens = layout.rows * shape.tokens / layout.cp
    copies = min(tables, 1 if shape.tied else 2)
    held = shape.width * (copies * shape.vocab + (rank == 0) * shape.positions)
    own = segments(shape, layout, blocks, held)
    whole = sum(one.elements for one in own)
    shared = sum(one.elements / one.ranks for one in own)
    buffers = stash.again
    if rank == layout.last_rank:
        buffers += (stack.logit_bytes + e) * tokens * shape.vocab / tp
    if layout.zero >= 3:
        block = sum(one.elements for one in segments(shape, layout, stack.unit))
        second, first = sorted([block, block, *[shape.vocab * shape.width / tp] * tables])[-2:]
        buffers += (first + second) * e + first * stack.gradient_bytes
    elif layout.zero == 2:
        buffers += whole * e
    return Memory(
        (shared if layout.zero >= 3 else whole) * stack.weight_bytes,
        (shared if layout.zero >= 2 else whole) * stack.gradient_bytes,
        (shared if layout.zero else whole) * stack.optimizer_bytes,
        blocks / layout.chunks * flight * stash.kept + e * tokens * shape.width * tables,
        buffers,
    )


Flights = Callable[[str, int, int, int, int], int]  # in_flight, which a search may cache


def fullest(shape: Shape, layout: Layout, stack: Stack, flights: Flights = in_flight) -> Memory:
    """Return the memory of the fullest rank: an end of the pipeline, or the one beside it."""
    stash, blocks = stash_of(shape, layout, stack), layout.blocks_by_rank(shape.layers)
    schedule, last = (layout.schedule, layout.pp, layout.chunks), layout.pp - 1
    found = []
    for rank in {0, min(1, last), max(last - 1, 0), last}:
        flight = flights(*schedule, rank, layout.num_microbatches)
        found.append(memory_of(shape, layout, stack, rank, blocks[rank], stash, flight))
    return max(found, key=lambda one: one.total)
