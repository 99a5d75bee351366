"""The memory of a rank: parameter states, the stash of its microbatches, and the rest.

In closed form, the stash of a block is that of arXiv 2205.05198, extended to grouped heads and
gates: inputs of norms, of matmuls and of the activation function, masks of dropout, and scores
where they are stored. `on_shapes` asks mpipar's own step instead. Letters as in job.py.
"""

from collections.abc import Callable
from typing import NamedTuple

from mpipar.config.sections import Config
from mpipar.pipeline.instructions import parts
from mpipar.pipeline.schedules.catalog import FAMILIES
from mpipar.study.explain.predict import predict
from mpipar.study.plan.job import Layout, Shape, Stack, segments

GIB = 1 << 30
AGAIN = 2.5  # a recomputed block holds its stash, and gradients in two widths besides: published
RESERVE = 1.75 * GIB  # contexts, libraries and buffers of collectives
STEADY = 3  # beyond this many microbatches per rank no order keeps more
BETWEEN = 0.03  # of a step's temporary arrays: memory lost to fragmentation


class Memory(NamedTuple):
    """Bytes of a rank, by label. reserve: outside of arrays, and lost to fragmentation."""

    weights: float
    gradients: float
    optimizer: float
    stash: float
    buffers: float
    reserve: float

    @property
    def total(self) -> float:
        return sum(self)


class Stash(NamedTuple):
    """Bytes of one microbatch in one block.

    kept: from forward to the input gradient. later: from there to a postponed weight gradient.
    again: needed while it runs again.
    """

    kept: float
    later: float
    again: float


def stash_of(shape: Shape, layout: Layout, stack: Stack) -> Stash:
    """Return what a block keeps of a microbatch from forward to backward.

    Without recomputation: what norms, matmuls and the activation function read. Software with
    dropout also keeps scores, and a byte for each masked number.
    """
    e, tp, n = stack.number_bytes, layout.tp, layout.rows * shape.seq_len / layout.cp
    once = e * n * shape.d_model / (tp if layout.sequence_parallel else 1)
    q, kv = (count * shape.head_dim / tp for count in (shape.heads, shape.kv_heads))
    share, k, gates = shape.expert_share, shape.experts_per_token, shape.gates
    dense = (1 - share) * shape.ffn + share * (shape.shared_expert_ffn or 0)
    f = (dense + share * k * (shape.expert_ffn or 0)) / tp
    wide = 2 if stack.own else gates + 1
    kept = 4 * once + e * n * (2 * q + 2 * kv + wide * f + share * k * shape.d_model)
    if stack.norm_bytes:  # replaces numbers as wide as the others
        kept += 2 * once * (stack.norm_bytes / e - 1)
    scores = 0.0 if stack.fused else n * shape.seq_len * shape.heads / tp * (2 * e + 1)
    kept += 0.0 if stack.fused else 2 * once / e
    own = {
        "block": once,
        "attention": kept * (0.6 if stack.every_other else 1),
        "none": kept + scores,
    }[layout.recompute]
    both = AGAIN * kept
    if stack.own:  # and two gradients of whole tokens, those of routed ones, and a gate's product
        width = (2 + share * k) * shape.d_model + (gates + 1 - wide) * f
        both = kept + 2 * once + e * n * width
    again = max(0.0, both - own + scores) if layout.recompute == "block" else 0.0
    return Stash(own, both if stack.own else own, again)


def in_flight(schedule: str, pp: int, chunks: int, rank: int, m: int) -> list[tuple[int, int]]:
    """Return how many microbatches of a stage a rank keeps when it is fullest, in its own order.

    Each pair is (those between their input gradient and the weight gradient, the most before it).
    """
    family = FAMILIES[schedule]
    waiting, pending = 0, 0
    most: dict[int, int] = {}
    for instr in family.order(pp, rank, m, *(chunks,) if family.looped else ()):
        for kind, _, _ in parts(instr):
            waiting += {"F": 1, "W": 0}.get(kind, -1)
            pending += (kind == "I") - (kind == "W")
        most[pending] = max(most.get(pending, 0), waiting)
    return [*most.items()]


def memory_of(
    shape: Shape, layout: Layout, stack: Stack, rank: int, blocks: int, stash: Stash, flight: float
) -> Memory:
    """Return the memory of a pipeline rank of so many blocks. flight: see `in_flight`."""
    e, tp, tables = stack.number_bytes, layout.tp, (rank == 0) + (rank == layout.last_rank)
    tokens = layout.rows * shape.seq_len / layout.cp
    copies = min(tables, 1 if shape.tied else 2)
    held = shape.d_model * (copies * shape.vocab_size + (rank == 0) * shape.position_rows)
    own = segments(shape, layout, blocks, held)
    whole = sum(one.elements for one in own)
    shared = sum(one.elements / one.ranks for one in own)
    buffers = stash.again
    if rank == layout.last_rank:
        buffers += (stack.logit_bytes + e) * tokens * shape.vocab_size / tp
    if layout.zero == 3:
        block = sum(one.elements for one in segments(shape, layout, 1.0))
        second, first = sorted([block, block, *[shape.vocab_size * shape.d_model / tp] * tables])[
            -2:
        ]
        buffers += (first + second) * e + first * stack.gradient_bytes
    kept = blocks / layout.chunks * flight * stash.kept + e * tokens * shape.d_model * tables
    return Memory(
        (shared if layout.zero == 3 else whole) * stack.weight_bytes,
        (shared if layout.zero == 3 else whole) * stack.gradient_bytes,
        (shared if layout.zero else whole) * stack.optimizer_bytes,
        kept,
        buffers,
        RESERVE + BETWEEN * (kept + buffers),
    )


def by_rank(
    shape: Shape, layout: Layout, stack: Stack, flights: Callable = in_flight
) -> dict[int, Memory]:
    """Return the memory of the pipeline ranks that may be fullest: the ends, and those beside.

    flights: `in_flight`, which a search caches.
    """
    stash, blocks = stash_of(shape, layout, stack), layout.blocks_by_rank(shape.layers)
    order, last = (layout.schedule, layout.pp, layout.chunks), layout.pp - 1
    found, later = {}, stash.later / stash.kept
    for rank in sorted({0, min(1, last), max(last - 1, 0), last}):
        pairs = flights(*order, rank, min(layout.num_microbatches, STEADY * layout.pp))
        flight = max(waiting + later * pending for pending, waiting in pairs)
        found[rank] = memory_of(shape, layout, stack, rank, blocks[rank], stash, flight)
    return found


def fullest(shape: Shape, layout: Layout, stack: Stack, flights: Callable = in_flight) -> Memory:
    """Return the memory of the fullest rank in closed form."""
    return max(by_rank(shape, layout, stack, flights).values(), key=sum)


def on_shapes(config: Config, layout: Layout, pp_rank: int) -> Memory:
    """Return what mpipar's own step keeps on a pipeline rank. config: resolved."""
    peaks = predict(config, pp_rank * layout.stage_stride).peak_bytes
    known = {name: peaks.get(name, 0) for name in Memory._fields}
    known["buffers"] += sum(peaks.values()) - sum(known.values())
    return Memory(**known | {"reserve": RESERVE})
