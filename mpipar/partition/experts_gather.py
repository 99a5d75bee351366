"""Expert dispatch by all-gather: every rank gets all rows, and takes those of its experts.

One reduce-scatter adds up what all ranks have computed for a token. Every rank sends (q-1) N rows
and receives as many, however popular the experts are. Where K is close to q or larger, that is less
than the all-to-all sends.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from mpipar.comm.grid import chunk_size, consecutive_slices
from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.partition import chunks
from mpipar.partition.contracts import Choice


class Plan(NamedTuple):
    """Which of all rows this rank takes.

    counts: rows of each expert of this rank. length: this rank's number of tokens; most: that of
    the rank with the most tokens, to which the others are padded. probs, places (q most, K): of all
    choices. start: place of this rank's first row among the sorted choices. order, tokens (R,): of
    its rows.
    """

    counts: list[int]
    length: int
    most: int
    probs: Array
    places: Array
    start: int
    order: Array
    tokens: Array


def plan(ops: Ops, choice: Choice, experts: int, comm: Comm, name: str) -> Plan:
    """Return the Plan of a choice.

    Comm: one all_reduce of a number, and two all_gathers, of ids and of probabilities.
    """
    length, width = choice.ids.shape
    lengths = ops.empty((1,), choice.ids.dtype, label="buffers")
    ops.fill(lengths, length)
    (most,) = ops.row_counts(comm.all_reduce(lengths, f"{name}.counts", "max"), length)
    own = ops.empty((most, width), choice.ids.dtype, label="buffers")
    ops.fill(own, experts)  # an id that no rank's expert has
    ops.copy(own[:length], choice.ids)
    ids = comm.all_gather(own, f"{name}.counts").reshape(-1, width)
    probs = comm.all_gather(chunks.pad(ops, choice.probs, 0, most), f"{name}.counts")
    order, tokens, places = ops.expert_order(ids)
    each = chunk_size(experts, comm.size)
    here = consecutive_slices(itertools.repeat(each, comm.size))[comm.index]
    loads = ops.row_counts(
        ops.expert_loads(ids.reshape(1, -1), experts), ids.size, (len(ids), min(width, each)), here
    )
    counts = loads[here]
    before, mine = consecutive_slices([sum(loads[: here.start]), sum(counts)])
    return Plan(
        counts,
        length,
        most,
        probs.reshape(-1, width),
        places,
        before.stop,
        order.reshape(-1)[mine],
        tokens.reshape(-1)[mine],
    )


def rows(ops: Ops, x: Array, plan: Plan, comm: Comm, name: str) -> Array:
    """Return (R, D): rows of all ranks' x (N, D), sorted by expert. Comm: one all_gather."""
    whole = comm.all_gather(chunks.pad(ops, x, 0, plan.most), f"{name}.dispatch")
    return ops.embedding_forward(plan.tokens, whole.reshape(-1, x.shape[-1]), 0)


def factors(ops: Ops, plan: Plan, comm: Comm, name: str) -> Array:
    """Return (R,): the probability of each row."""
    return ops.embedding_forward(plan.order, plan.probs.reshape(-1, 1), 0).reshape(-1)


def combine(ops: Ops, rows: Array, plan: Plan, weighted: bool, comm: Comm, name: str) -> Array:
    """Return (N, D): the sum of each token's rows (R, D). Comm: one reduce_scatter."""
    chosen = ops.embedding_forward(plan.places, rows, plan.start)  # zeros for other ranks' rows
    whole = ops.combine_rows(chosen, plan.probs if weighted else None)
    return _own(whole, plan, comm, f"{name}.combine")


def factors_back(ops: Ops, factors: Array, plan: Plan, comm: Comm, name: str) -> Array:
    """Return (N, K): the rows' factors (R,), back at their choices. Comm: one reduce_scatter."""
    whole = ops.embedding_forward(plan.places, factors.reshape(-1, 1), plan.start)
    return _own(whole.reshape(plan.places.shape), plan, comm, f"{name}.probs")


def _own(whole: Array, plan: Plan, comm: Comm, name: str) -> Array:
    """Return this rank's rows of the sum of all ranks' (q most, ..). Comm: one reduce_scatter."""
    parts = whole.reshape(comm.size, plan.most, whole.shape[-1])
    return comm.reduce_scatter(parts, name)[: plan.length]
