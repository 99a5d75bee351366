"""Routings for study: which experts tokens pass if no router chooses, with the imbalance known.

A row of the table gives each expert a share of the choices. Training makes a table of places in a
row from it (`scores`), the benchmark of all-to-all-v makes parts of a message. Both are functions
of the place alone. So each row of data is alike, and the routing is that of every layout; only
`adversarial` asks which rank a token is on. Of 2^n tokens from a multiple of 2^n on, every expert
gets its share up to a token or two.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def _uniform(experts: int, index: int, ranks: int) -> Numbers:
    """All alike."""
    return np.ones(experts)


def _hot(experts: int, index: int, ranks: int) -> Numbers:
    """The first expert has twice as many as any other."""
    return 1.0 + (np.arange(experts) == 0)


def _one_hot(experts: int, index: int, ranks: int) -> Numbers:
    """Every token passes the first expert."""
    return np.array(np.arange(experts) == 0, float)


def _zipf(experts: int, index: int, ranks: int) -> Numbers:
    """The n-th expert has 1/n of what the first one has."""
    return 1 / np.arange(1.0, experts + 1)


def _adversarial(experts: int, index: int, ranks: int) -> Numbers:
    """All tokens of a rank go to the next rank."""
    return np.array(np.arange(experts) * ranks // experts == (index + 1) % ranks, float)


# --routing: (experts, index of a rank in its group, ranks of the group) -> a weight of each expert
ROUTINGS: dict[str, Callable[[int, int, int], Numbers]] = {
    "uniform": _uniform, "hot": _hot, "one-hot": _one_hot, "zipf": _zipf,
    "adversarial": _adversarial}


def shares(name: str, experts: int, per_token: int, index: int = 0, ranks: int = 1) -> Numbers:
    """Return how much of a rank's tokens pass each expert (E,): the sum is per_token.

    A token passes an expert once. So a share is at most 1, and the others get what is above that.
    """
    weights = ROUTINGS[name](experts, index, ranks)
    full = np.zeros(experts, bool)
    while True:
        left = np.where(full, 0.0, weights)
        if not left.any():  # only experts that nobody wants are left
            left = 1.0 * ~full
        found = np.where(full, 1.0, left * ((per_token - full.sum()) / (left.sum() or 1)))
        if not (found > 1).any():
            return found
        full |= found > 1


def _spread(count: int) -> Numbers:
    """Numbers of [0, 1), of which every run of 2^n from a multiple of 2^n on is spread evenly.

    Source: van der Corput, 1935: the binary digits of 0, 1, 2 .. behind the point, reversed.
    """
    bits = max(count - 1, 1).bit_length()
    digits = np.arange(count)[:, None] >> np.arange(bits) & 1
    return digits @ 0.5 ** np.arange(1.0, bits + 1)


def scores(
    name: str, tokens: int, experts: int, per_token: int, index: int = 0, ranks: int = 1
) -> Numbers:
    """(tokens, E): 2 for the experts that the token at each place of a row passes, 0 for others.

    per_token points at distances of 1 in the running sum of shares: each hits another expert.
    """
    edges = np.cumsum(shares(name, experts, per_token, index, ranks))
    points = _spread(tokens)[:, None] + np.arange(per_token)
    chosen = np.minimum(np.searchsorted(edges, points + 1e-9, side="right"), experts - 1)
    table = np.zeros((tokens, experts))
    table[np.arange(tokens)[:, None], chosen] = 2.0
    return table
