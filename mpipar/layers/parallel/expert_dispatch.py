"""Expert parallelism: how rows of tokens reach the ranks that hold their experts, and come back.

A block's experts are distributed over the ranks of the group `expert`: rank i of q holds the i-th
E/q of them. Each rank has N tokens of its own, and a router has assigned K experts to each token.
Each row is sent to the rank of its expert, and sent back. Ranks first exchange how many rows each
has for each expert. A rank with a popular expert receives more rows than the others, which then
wait for it. A token with several of its K experts on one rank is sent there once per expert. Each
rank sends (q-1)/q of its K N rows if the experts are equally popular.

Rows are in the order of this rank's experts, and the rows of one expert in the order of ranks and
tokens, so every run yields the same bits. The number R of rows that a rank gets is not limited, so
no token is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

from mpipar.comm.grid import consecutive_slices
from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array


class Choice(NamedTuple):
    """A router's choice for N tokens: ids (N, K) of experts, and probs (N, K)."""

    ids: Array
    probs: Array


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


class ExpertDispatch:
    """Sends rows to `experts` experts over the group `comm`, and back. name: of the layer."""

    def __init__(self, ops: Ops, comm: Comm, name: str, experts: int) -> None:
        self.ops, self.comm, self.name, self.experts = ops, comm, name, experts

    def plan(self, choice: Choice) -> Plan:
        """Return the Plan of a choice. Comm: one all_to_all of the counts of all experts."""
        ops, comm = self.ops, self.comm
        order, tokens, places = ops.expert_order(choice.ids)
        loads = ops.expert_loads(choice.ids.reshape(1, -1), self.experts).reshape(comm.size, -1)
        here = ops.counts_to_host(loads, order.size)
        most = comm.size, len(choice.ids), min(choice.ids.shape[1], loads.shape[1])
        coming = ops.counts_to_host(comm.all_to_all(loads, f"{self.name}.counts"), order.size, most)
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

    def rows(self, x: Array, plan: Plan) -> Array:
        """Return (R, D): rows of x (N, D), sorted by expert. Comm: one all_to_allv."""
        return self._send(x, plan.tokens, plan, "dispatch")

    def factors(self, plan: Plan) -> Array:
        """Return (R,): the probability of each row. Comm: one all_to_allv."""
        probs = plan.probs.reshape(-1, 1)
        return self._send(probs, plan.order, plan, "probs").reshape(-1)

    def combine(self, rows: Array, plan: Plan, *, weighted: bool) -> Array:
        """Return (N, D): the sum of each token's rows (R, D). Comm: one all_to_allv."""
        mine = self._return(rows, plan, "combine")
        return self.ops.combine_rows(
            self.ops.embedding_forward(plan.places, mine, 0), plan.probs if weighted else None
        )

    def factors_back(self, factors: Array, plan: Plan) -> Array:
        """Return (N, K): the rows' factors (R,), back at their choices. Comm: one all_to_allv."""
        mine = self._return(factors.reshape(-1, 1), plan, "probs")
        return self.ops.embedding_forward(plan.places, mine, 0).reshape(plan.places.shape)

    def _send(self, x: Array, chosen: Array, plan: Plan, what: str) -> Array:
        """Send rows `chosen` of x; return those received, by expert. Comm: one all_to_allv."""
        there = self.ops.embedding_forward(chosen, x, 0)
        arrived, _ = self.comm.all_to_allv(there, plan.sent, f"{self.name}.{what}", plan.received)
        return (
            arrived
            if plan.by_expert is None
            else self.ops.embedding_forward(plan.by_expert, arrived, 0)
        )

    def _return(self, rows: Array, plan: Plan, what: str) -> Array:
        """Return rows to the ranks that sent them, in the order sent. Comm: one all_to_allv."""
        there = rows if plan.by_rank is None else self.ops.embedding_forward(plan.by_rank, rows, 0)
        return self.comm.all_to_allv(there, plan.received, f"{self.name}.{what}", plan.sent)[0]
