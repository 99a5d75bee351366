"""Placements of a model's stages on pipeline ranks, one per row.

Letters: p ranks, s a stage, v stages per rank.
"""

from collections.abc import Callable
from typing import NamedTuple

Home = Callable[[int, int], int]  # (s, p) -> the rank that holds stage s


class Placement(NamedTuple):
    """Which rank holds a stage.

    home: the rank of a stage. chunks: v. free: whether another v may be chosen.
    """

    home: Home
    chunks: int = 1
    free: bool = False

    def fits(self, p: int, num_stages: int) -> bool:
        """Return whether this many stages can be placed on p ranks."""
        return num_stages % p == 0 if self.free else num_stages == self.chunks * p

    def stage_to_rank(self, p: int, num_stages: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        return tuple(self.home(stage, p) for stage in range(num_stages))


PLACEMENTS = {
    "linear": Placement(lambda s, p: s),
    # Down the ranks and back up, so the first rank holds the first and the last stage.
    "v": Placement(lambda s, p: min(s, 2 * p - 1 - s), chunks=2),
    "looped": Placement(lambda s, p: s % p, chunks=2, free=True),
}
