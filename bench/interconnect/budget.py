"""The time of a whole command, and what is measured in it: how many rounds, and which sizes."""

from __future__ import annotations

import math
import time

import numpy as np

SECONDS = 120.0  # the default of --seconds
LEAST_SIZES = 3  # of each operation, however long they take: a line has to be fitted through them


def add_seconds(parser) -> None:
    """Add --seconds to a parser."""
    parser.add_argument("--seconds", type=float, default=SECONDS,
                        help="time of the whole command, which chooses rounds and sizes by it "
                             f"({SECONDS:g})")


def seconds_problems(seconds: float) -> list[str]:
    """What is wrong with a value of --seconds."""
    return [] if 0 < seconds < math.inf else [
        f"--seconds {seconds:g}: give the time of the whole command, above 0, as 60"]


class Budget:
    """Seconds that begin now. Every rank of `world` makes it and asks it together.

    Only world rank 0 looks at its clock, so that all ranks decide alike.
    """

    def __init__(self, world, seconds: float):
        self.world, self.end = world, time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, below 0 when it is over. Comm: one broadcast over the world."""
        left = np.array([self.end - time.monotonic()])
        self.world.Bcast(left)
        return float(left[0])

    def part(self, share: float) -> Budget:
        """A budget of this share of what is left. Comm: one broadcast."""
        return Budget(self.world, share * self.left())

    def shares(self, things):
        """Yield (thing, its budget): those that are still to come have equal parts.

        Comm: one broadcast for each.
        """
        for number, thing in enumerate(things):
            yield thing, self.part(1 / (len(things) - number))

    def rounds(self, most: int):
        """Yield round numbers, as long as one more is likely to end in time; at least the first.

        Comm: one broadcast for each round.
        """
        longest, before = 0.0, self.left()
        for number in range(most):
            if number and longest > before:
                return
            yield number
            before, begun = self.left(), before
            longest = max(longest, begun - before)

    def sizes(self, every):
        """Yield the ascending sizes `every` that there is time for; at least `LEAST_SIZES`.

        First comes every fourth size, then every second, then the rest. So little time still covers
        a wide range.
        Comm: one broadcast for each size.
        """
        took: dict[int, float] = {}
        before = self.left()
        for size in dict.fromkeys(one for stride in (4, 2, 1) for one in every[::-stride][::-1]):
            if len(took) < LEAST_SIZES or expected_seconds(took, size) <= before:
                yield size
                before, begun = self.left(), before
                took[size] = begun - before


def expected_seconds(took: dict[int, float], size: int) -> float:
    """How long a size will take; took: {size: seconds} of those that have been measured.

    A size between others is expected to take as long as its larger neighbour. One that is larger
    than all before is expected to take longer in proportion, apart from what every size takes.
    """
    above = [one for one in took if one >= size]
    if above:
        return took[min(above)]
    always, largest = min(took.values()) if len(took) > 1 else 0.0, max(took)
    return always + (took[largest] - always) * size / max(1, largest)
