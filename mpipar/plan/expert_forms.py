"""Text on the cost of experts: the rows that are exchanged, and the load imbalance."""

from __future__ import annotations

from mpipar.comm.grid import chunk_size
from mpipar.data.routing import shares
from mpipar.layers.costs import KINDS
from mpipar.partition.experts import DISPATCHES

SENDS = {  # --expert-dispatch: (formula, how many times its tokens a rank sends)
    "all-to-all": ("k(ep-1)/ep", lambda k, ep: k * (ep - 1) / ep),
    "all-gather": ("ep-1", lambda k, ep: ep - 1)}


def exchanged(config) -> str:
    """Return how many times its tokens a rank sends per exchange of rows, and their number."""
    model, grid = config.model, config.grid
    formula, times = SENDS[grid.expert_dispatch]
    each = chunk_size(model.experts, grid.ep)
    barriers = DISPATCHES[grid.expert_dispatch].barriers
    rows = [phase for phase, ending, *_ in barriers if ending in ("dispatch", "combine")]
    calls = sum(len(KINDS[kind].operations) for _, _, kind, _ in barriers)
    return (f"experts: {each} of {model.experts} on a rank. It sends {formula} ="
            f" {times(model.experts_per_token, grid.ep):g} times its tokens in each of"
            f" {rows.count('F')} exchanges of rows forward and {rows.count('I')} backward, of"
            f" {calls} calls for a block and a microbatch")


def imbalance(config) -> str:
    """Return how uneven a forced routing makes the load of experts and ranks; "" if learned."""
    model, ep = config.model, config.grid.ep
    if model.routing == "learned":
        return ""
    loads = sum(shares(model.routing, model.experts, model.experts_per_token, rank, ep)
                for rank in range(ep))
    ranks = loads.reshape(ep, -1).sum(axis=1)
    return (f"routing {model.routing}: the busiest expert gets {loads.max() / loads.mean():.2f}"
            f" times the mean, the busiest rank {ranks.max() / ranks.mean():.2f} times")
