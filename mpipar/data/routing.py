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


def _uniform(experts: int, index: int, ranks: int) -> Numbers:
    """Return equal weights."""
    return np.ones(experts)


def _hot(experts: int, index: int, ranks: int) -> Numbers:
    """Return a weight for the first expert that is twice that of the others."""
    return 1.0 + (np.arange(experts) == 0)


def _one_hot(experts: int, index: int, ranks: int) -> Numbers:
    """Return weights that send every token to the first expert."""
    return np.array(np.arange(experts) == 0, float)


def _zipf(experts: int, index: int, ranks: int) -> Numbers:
    """Return 1/n of the first expert's weight for the n-th."""
    return 1 / np.arange(1.0, experts + 1)


def _adversarial(experts: int, index: int, ranks: int) -> Numbers:
    """Return weights that send all tokens of a rank to the next rank."""
    return np.array(np.arange(experts) * ranks // experts == (index + 1) % ranks, float)


# --routing: (experts, index of a rank in its group, ranks of the group) -> a weight per expert
ROUTINGS: dict[str, Callable[[int, int, int], Numbers]] = {
    "uniform": _uniform, "hot": _hot, "one-hot": _one_hot, "zipf": _zipf,
    "adversarial": _adversarial}


def shares(name: str, experts: int, per_token: int, index: int = 0, ranks: int = 1) -> Numbers:
    """Return what fraction of a rank's tokens goes to each expert (E,); the sum is per_token.

    A token goes to an expert at most once, so a share is at most 1; the others get the excess.
    """
    weights = ROUTINGS[name](experts, index, ranks)
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
