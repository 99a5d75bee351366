"""Expert dispatch by all-to-all: each row is sent to the rank of its expert, and sent back.

Ranks first exchange how many rows each has for each expert. A rank with a popular expert receives
more rows than the others, which then wait for it. A token with several of its K experts on one rank
is sent there once per expert. Each rank sends (q-1)/q of its K N rows if the experts are equally
popular.
"""

from __future__ import annotations

from typing import NamedTuple

from mpipar.comm.grid import consecutive_slices
from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.partition.contracts import Choice


class Plan(NamedTuple):
    """How many rows go where, and in what order.

    counts: rows of each expert of this rank. sent, received: rows to and from each rank. order,
    tokens (N K,): choices and their tokens in the order in which they are sent; places (N, K):
    where each choice is in that order. by_expert (R,): the permutation that sorts the rows
    received, which are ordered by rank, by expert; by_rank: its inverse. Both are None where rows
    are sorted already, because they come from one rank or are for one expert.
    """

    probs: Array
    counts: list[int]
    sent: list[int]
    received: list[int]
    order: Array
    tokens: Array
    places: Array
    by_expert: Array | None
    by_rank: Array | None


def plan(ops: Ops, choice: Choice, experts: int, comm: Comm, name: str) -> Plan:
    """Return the Plan of a choice. Comm: one all_to_all of the counts of all experts."""
    order, tokens, places = ops.expert_order(choice.ids)
    loads = ops.expert_loads(choice.ids.reshape(1, -1), experts).reshape(comm.size, -1)
    here = ops.row_counts(loads, order.size)
    most = comm.size, len(choice.ids), min(choice.ids.shape[1], loads.shape[1])
    coming = ops.row_counts(comm.all_to_all(loads, f"{name}.counts"), order.size, most)
    # By source or target rank, and by the experts of the rank that gets the rows.
    each = consecutive_slices(loads.shape[1] for _ in range(comm.size))
    sent, received = ([counts[one] for one in each] for counts in (here, coming))
    is_sorted = 1 in (len(received), len(received[0]))
    sorts = (None, None) if is_sorted else ops.block_order(received)
    return Plan(
        choice.probs,
        [sum(counts) for counts in zip(*received, strict=True)],
        list(map(sum, sent)),
        list(map(sum, received)),
        order.reshape(-1),
        tokens.reshape(-1),
        places,
        *sorts,
    )


def rows(ops: Ops, x: Array, plan: Plan, comm: Comm, name: str) -> Array:
    """Return (R, D): rows of x (N, D), sorted by expert. Comm: one all_to_allv."""
    return _send(ops, x, plan.tokens, plan, comm, f"{name}.dispatch")


def factors(ops: Ops, plan: Plan, comm: Comm, name: str) -> Array:
    """Return (R,): the probability of each row. Comm: one all_to_allv."""
    probs = plan.probs.reshape(-1, 1)
    return _send(ops, probs, plan.order, plan, comm, f"{name}.probs").reshape(-1)


def combine(ops: Ops, rows: Array, plan: Plan, weighted: bool, comm: Comm, name: str) -> Array:
    """Return (N, D): the sum of each token's rows (R, D). Comm: one all_to_allv."""
    mine = _return(ops, rows, plan, comm, f"{name}.combine")
    return ops.combine_rows(
        ops.embedding_forward(plan.places, mine, 0), plan.probs if weighted else None
    )


def factors_back(ops: Ops, factors: Array, plan: Plan, comm: Comm, name: str) -> Array:
    """Return (N, K): the rows' factors (R,), back at their choices. Comm: one all_to_allv."""
    mine = _return(ops, factors.reshape(-1, 1), plan, comm, f"{name}.probs")
    return ops.embedding_forward(plan.places, mine, 0).reshape(plan.places.shape)


def _send(ops: Ops, x: Array, chosen: Array, plan: Plan, comm: Comm, name: str) -> Array:
    """Send rows `chosen` of x; return those received, sorted by expert. Comm: one all_to_allv."""
    there = ops.embedding_forward(chosen, x, 0)
    arrived, _ = comm.all_to_allv(there, plan.sent, name, plan.received)
    return arrived if plan.by_expert is None else ops.embedding_forward(plan.by_expert, arrived, 0)


def _return(ops: Ops, rows: Array, plan: Plan, comm: Comm, name: str) -> Array:
    """Return rows to the ranks that sent them, in the order sent. Comm: one all_to_allv."""
    there = rows if plan.by_rank is None else ops.embedding_forward(plan.by_rank, rows, 0)
    return comm.all_to_allv(there, plan.received, name, plan.sent)[0]
