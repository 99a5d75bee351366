"""The time of an all-reduce by each of its algorithms, composed of messages and local sums."""

from __future__ import annotations

import math


def all_reduce_models(hop, reduction, nbytes: float, ranks: int) -> dict[str, float]:
    """{algorithm: time}. hop(bytes), reduction(bytes) -> time of a message and of a local sum.

    The last two formulas hold for powers of two; other numbers of ranks are rounded up to the next.
    Source: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations, 2005.
    """
    part, logs = nbytes / ranks, math.ceil(math.log2(ranks))
    halves = [nbytes / 2 ** (k + 1) for k in range(logs)]
    return {
        "ring": (ranks - 1) * (2 * hop(part) + reduction(part)),
        "recursive doubling": logs * (hop(nbytes) + reduction(nbytes)),
        "Rabenseifner": sum(2 * hop(half) + reduction(half) for half in halves),
    }
