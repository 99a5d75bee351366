"""The time budget of a command: how many rounds and which sizes are measured.

A quick run ends in a stated time on any link, and reports what it leaves out.
"""

from __future__ import annotations

import math
import sys
import time

import numpy as np

from mpipar.files.text import counted

SECONDS = 120.0  # the default of --seconds, also with --quick: of all launches
LEAST_SIZES = 3  # of each operation, however long they take: a line must be fitted to them


def add_seconds(parser) -> None:
    """Add --seconds to a parser."""
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help=f"time of the whole command, which chooses rounds and sizes accordingly ({SECONDS:g})",
    )


def seconds_problems(seconds: float) -> list[str]:
    """Return what is wrong with a value of --seconds."""
    return (
        []
        if 0 < seconds < math.inf
        else [f"--seconds {seconds:g}: give the time of the whole command, above 0, such as 60"]
    )


class Budget:
    """Seconds that begin now. Every rank of `world` makes it and asks it together.

    Only world rank 0 looks at its clock, so that all ranks make the same decision.
    """

    def __init__(self, world, seconds: float):
        self.world, self.end = world, time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds left, below 0 when it is over. Comm: one broadcast over the world."""
        left = np.array([self.end - time.monotonic()])
        self.world.Bcast(left)
        return float(left[0])

    def part(self, share: float) -> Budget:
        """Return a budget of this share of what is left. Comm: one broadcast."""
        return Budget(self.world, share * self.left())

    def shares(self, things):
        """Yield (thing, its budget): those that are still to come have equal shares.

        Comm: one broadcast for each.
        """
        for number, thing in enumerate(things):
            yield thing, self.part(1 / (len(things) - number))

    def rounds(self, most: int):
        """Yield round numbers as long as one more is likely to end in time; at least the first.

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

        Every fourth size comes first, then every second, then the rest, so that little time still
        covers a wide range. Comm: one broadcast for each size.
        """
        took: dict[int, float] = {}
        before = self.left()
        for size in dict.fromkeys(one for stride in (4, 2, 1) for one in every[::-stride][::-1]):
            if len(took) < LEAST_SIZES or expected_seconds(took, size) <= before:
                yield size
                before, begun = self.left(), before
                took[size] = begun - before


def expected_seconds(took: dict[int, float], size: int) -> float:
    """Return how long a size will take; took: {size: seconds} of those that have been measured.

    A size between others is expected to take as long as its larger neighbour. One that is larger
    than all before is expected to take proportionally longer, apart from what every size takes.
    """
    above = [one for one in took if one >= size]
    if above:
        return took[min(above)]
    always, largest = min(took.values()) if len(took) > 1 else 0.0, max(took)
    return always + (took[largest] - always) * size / max(1, largest)


QUICK_SIZES = (64, 4 << 10, 64 << 10, 1 << 20)
QUICK_FOOTPRINT = 16 << 20
PLANNED = 0.9  # of the time: the last size may take longer than expected
LEAST_ITERATIONS = 4  # of each way of a size: the check, two to warm up, and one that counts
UNKNOWN = "unknown"  # the way of a size that ended in the warm-up
LEAST_SECONDS = 0.06  # of each way of a size, however fast it is


class Quick:
    """Chooses the sizes of each section, the smallest first, so that everything ends in time.

    Sections that are still to come have equal shares of the remaining time. A size that is expected
    to exceed its section's share waits for a later pass, so that fast sections leave their time to
    slow ones. Every rank makes it and asks it together; world rank 0 decides.
    """

    def __init__(self, bench, sections, seconds: float):
        self.bench, self.seconds = bench, seconds
        self.budget = Budget(bench.world, PLANNED * seconds)
        self.waiting = [(section, section.sizes) for section in sections]
        self.took: dict = {}  # of a title: {way: {size: seconds of an iteration}}; world rank 0

    def turns(self):
        """Yield (section, its sizes), which `Bench.run` takes. Comm: some broadcasts for each."""
        if self.bench.world.rank == 0:
            print(
                f"quick run: {counted(len(self.waiting), 'part')}, ends within {self.seconds:g} s",
                file=sys.stderr,
                flush=True,
            )
        before, last = None, False
        while self.waiting and not last:
            last = self.waiting == before  # nothing fitted into its part: now each may take all
            before, self.waiting = self.waiting, []
            for number, (section, sizes) in enumerate(before):
                later, parts = [], len(before) - number
                yield section, self._fitting(section, sizes, parts, later, whole=last)
                if later:
                    self.waiting.append((section, tuple(later)))

    def _fitting(self, section, sizes, parts: int, later: list[int], whole: bool):
        """Yield the sizes that fit into one of `parts` parts; append the others to `later`.

        whole: each may have all the remaining time.
        """
        took = self.took.setdefault(section.title.removeprefix("pairs "), {})
        own, world = self.budget.part(1.0 if whole else 1 / parts), self.bench.world
        for size in sizes:
            left = own.left()
            # An unmeasured section takes at least as long as the fastest other one.
            quickest = [took] if took else [one for one in self.took.values() if one] or [{}]
            fits = np.array([left > min(least_seconds(one, size) for one in quickest)])
            world.Bcast(fits)
            if fits[0]:
                if world.rank == 0 and size == sizes[0]:
                    seconds = self.budget.end - time.monotonic()
                    print(
                        f"quick run: {section.title}; left: {counted(parts, 'part')}, at most "
                        f"{seconds:.0f} s",
                        file=sys.stderr,
                        flush=True,
                    )
                self.bench.end, refused = time.monotonic() + left, len(self.bench.refused)
                yield size
                known = self._note(took, size, left - own.left())
                fits[0] = known or len(self.bench.refused) > refused
                world.Bcast(fits)
            if not fits[0]:
                later.append(size)

    def _note(self, took: dict, size: int, spent: float) -> bool:
        """Keep what a size has taken; return False if it ended in the warm-up."""
        for row in self.bench.latest:
            seconds = row["median_us"] * row["per_sample"] * 1e-6
            known = took.setdefault(row["via"], {})
            known[size] = max(seconds, known.get(size, 0.0))
        took.pop(UNKNOWN, None)
        if not self.bench.latest:
            took[UNKNOWN] = {size: spent / LEAST_ITERATIONS}
        return bool(self.bench.latest)

    def conclude(self) -> None:
        """Print how long it took and what it left out. Comm: one broadcast."""
        spent = PLANNED * self.seconds - self.budget.left()
        if self.bench.world.rank == 0:
            print(f"quick run: {spent:.0f} s of {self.seconds:g}", file=sys.stderr)
            for section, sizes in self.waiting:
                print(
                    f"not measured, for lack of time: {section.title}, "
                    f"{', '.join(map(str, sizes))} bytes",
                    file=sys.stderr,
                )


def least_seconds(took: dict, size: int) -> float:
    """Return how long a size will take at least; took: {way: {size: seconds of an iteration}}.

    0 where nothing is known.
    """
    return sum(
        max(LEAST_SECONDS, LEAST_ITERATIONS * expected_seconds(known, size))
        for known in took.values()
    )
