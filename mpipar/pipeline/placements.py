"""Placements of a model's stages on pipeline ranks, one per row.

Letters: p ranks, s a stage, v stages per rank, m microbatches.
"""

from collections.abc import Callable
from typing import NamedTuple

Home = Callable[[int, int], int]  # (s, p) -> the rank that holds stage s


class Placement(NamedTuple):
    """Which rank holds a stage.

    copies: the home of each stage, once for each copy of the model. The copies process equal shares
    of the microbatches, in their order. chunks: v. free: whether another v may be chosen.
    """

    copies: tuple[Home, ...]
    chunks: int = 1
    free: bool = False

    def fits(self, p: int, num_stages: int, m: int) -> bool:
        """Return whether this many stages and microbatches can be placed on p ranks."""
        of_ranks = num_stages % p == 0 if self.free else num_stages == self.chunks * p
        return of_ranks and p % len(self.copies) == 0 and m % len(self.copies) == 0

    def homes(self, p: int, num_stages: int) -> tuple[tuple[int, ...], ...]:
        """Return the rank of each stage, for each copy of the model."""
        return tuple(tuple(home(stage, p) for stage in range(num_stages)) for home in self.copies)


PLACEMENTS = {
    "linear": Placement((lambda s, p: s,)),
    # Down the ranks and back up, so the first rank holds the first and the last stage.
    "v": Placement((lambda s, p: min(s, 2 * p - 1 - s),), chunks=2),
    "looped": Placement((lambda s, p: s % p,), chunks=2, free=True),
    # Each half of the microbatches enters at a different end of the ranks.
    "mirror": Placement((lambda s, p: s, lambda s, p: p - 1 - s)),
}
