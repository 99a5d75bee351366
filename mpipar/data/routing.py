"""Synthetic routings for study: which experts tokens go to without a router, with known imbalance.

A row of the table assigns each expert a share of the selections. From it, training builds a table
over the places of a row (`scores`), and the all-to-all-v benchmark the parts of a message. Both are
functions of the place alone, so all rows of data are treated equally and the routing is the same on
every layout; only `adversarial` depends on the rank of a token. Among 2^n tokens that start at a
multiple of 2^n, every expert gets its share to within a token or two.
"""

from __future__ import annotations

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


def _spread(count: int) -> Numbers:
    """Return numbers in [0, 1) whose every run of 2^n from a multiple of 2^n on is evenly spread.

    Source: van der Corput, 1935: the binary digits of 0, 1, 2 .. reversed, after the point.
    """
    bits = max(count - 1, 1).bit_length()
    digits = np.arange(count)[:, None] >> np.arange(bits) & 1
    return digits @ 0.5 ** np.arange(1.0, bits + 1)


def scores(
    name: str, tokens: int, experts: int, per_token: int, index: int = 0, ranks: int = 1
) -> Numbers:
    """Return (tokens, E): 2 for the experts of the token at each place of a row, 0 for others.

    It uses per_token points, one apart, in the running sum of shares: each hits another expert.
    """
    edges = np.cumsum(shares(name, experts, per_token, index, ranks))
    points = _spread(tokens)[:, None] + np.arange(per_token)
    chosen = np.minimum(np.searchsorted(edges, points + 1e-9, side="right"), experts - 1)
    table = np.zeros((tokens, experts))
    table[np.arange(tokens)[:, None], chosen] = 2.0
    return table
