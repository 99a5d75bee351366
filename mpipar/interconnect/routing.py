"""Synthetic routings: which experts tokens go to without a router, with known imbalance.

A row of the table assigns each expert a share of the selections, from which the all-to-all-v
benchmark makes the parts of a message. Only `adversarial` depends on the rank of a token.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


# Name: (numbers of the experts from 0, which of them the next rank holds) -> their weights
ROUTINGS: dict[str, Callable[[Numbers, Numbers], Numbers]] = {
    "uniform": lambda number, on_next: np.ones(number.shape),
    "hot": lambda number, on_next: 1 + (number == 0),  # the first one is twice as popular
    "one-hot": lambda number, on_next: number == 0,
    "zipf": lambda number, on_next: 1 / (number + 1),
    "adversarial": lambda number, on_next: on_next,
}


def shares(name: str, experts: int, per_token: int, index: int = 0, ranks: int = 1) -> Numbers:
    """Return what fraction of a rank's tokens goes to each expert (E,); the sum is per_token.

    A token goes to an expert at most once, so a share is at most 1; the others get the excess.
    """
    number = np.arange(experts)
    on_next = number * ranks // experts == (index + 1) % ranks
    weights = ROUTINGS[name](number, on_next).astype(float)
    full = np.zeros(experts, bool)
    while True:
        left = np.where(full, 0.0, weights)
        if not left.any():  # only experts of weight 0 are left
            left = 1.0 * ~full
        found = np.where(full, 1.0, left * ((per_token - full.sum()) / (left.sum() or 1)))
        if not (found > 1).any():
            return found
        full |= found > 1
