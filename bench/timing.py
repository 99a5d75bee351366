"""Times calls one after the other, for benchmarks that take the best or the median of a few."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter


def seconds_of(
    call: Callable[[], object], repeats: int, clock: Callable[[], float] = perf_counter
) -> list[float]:
    """Return the seconds of each of some calls."""
    found = []
    for _ in range(repeats):
        start = clock()
        call()
        found.append(clock() - start)
    return found
