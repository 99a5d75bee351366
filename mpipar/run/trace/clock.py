"""A common clock for all ranks: which ranks share a clock, and how far the others are off.

Processes of one host and one time namespace read the same monotonic clock, which is used as it is.

Between hosts, ping-pong with world rank 0 measures the offset, before and after the traced steps.
Of many round trips the shortest is used: the other clock is assumed to be read at its midpoint, and
half of its length bounds the error. The two offsets define a line, whose slope is the drift. Times
are in nanoseconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np

from mpipar.comm.objects import all_gather_objects

if TYPE_CHECKING:
    from mpi4py import MPI

ROUND_TRIPS = 100
TAG = 11


@dataclass(frozen=True)
class Sample:
    """At `local_ns` of a clock, it was `offset_ns` +- `error_ns` ahead of world rank 0's clock."""

    local_ns: int
    offset_ns: float
    error_ns: float


def clock_identity() -> str:
    """Return a text that identifies this rank's monotonic clock: host, boot and time namespace."""

    def read(function: Callable[[str], str], path: str) -> str:
        try:
            return function(path)
        except OSError:
            return ""

    boot = read(lambda path: Path(path).read_text().strip(), "/proc/sys/kernel/random/boot_id")
    namespace = read(os.readlink, "/proc/self/ns/time")
    return f"{os.uname().nodename} {boot} {namespace}"


def shared_clocks(mpi_world: MPI.Intracomm, identity: str) -> list[int]:
    """Return, for each world rank, the lowest rank that reads the same clock.

    Comm: one gather of facts over the world, outside the records.
    """
    identities = all_gather_objects(mpi_world, identity)
    return [identities.index(one) for one in identities]


def best_sample(trips: list[tuple[int, int, int]]) -> Sample:
    """Return the Sample of the shortest of [(sent, other clock, received)], timed by rank 0."""
    sent, local, received = min(trips, key=lambda trip: trip[2] - trip[0])
    return Sample(local, local - (sent + received) / 2, (received - sent) / 2)


def measure_clocks(
    mpi_world: MPI.Intracomm, owners: Sequence[int], clock: Callable[[], int] = perf_counter_ns
) -> dict[int, Sample]:
    """Return {lowest rank of a clock: Sample} on world rank 0, {} elsewhere.

    Every rank calls it. owners: see `shared_clocks`; if all share a clock, nothing is sent.
    Comm: ROUND_TRIPS ping-pongs of 8 bytes with the lowest rank of each clock except world rank
    0's, outside the records.
    """
    message = np.zeros(1, np.int64)
    samples = {}
    for owner in sorted(set(owners) - {0}):
        trips = []
        for _ in range(ROUND_TRIPS):
            if mpi_world.rank == 0:
                sent = clock()
                mpi_world.Send(message, owner, TAG)
                mpi_world.Recv(message, owner, TAG)
                trips.append((sent, int(message[0]), clock()))
            elif mpi_world.rank == owner:
                mpi_world.Recv(message, 0, TAG)
                message[0] = clock()
                mpi_world.Send(message, 0, TAG)
        if trips:
            samples[owner] = best_sample(trips)
    return samples


@dataclass(frozen=True)
class CommonClock:
    """Translates every rank's times to world rank 0's clock.

    owners: for each world rank, the lowest rank with the same clock.
    before, after: Samples by owner. If `after` is missing (the run ended too early), the drift is
    taken as zero.
    """

    owners: tuple[int, ...]
    before: dict[int, Sample]
    after: dict[int, Sample]

    def common_ns(self, world_rank: int, local_ns):
        """Return world rank 0's time when the rank's clock shows local_ns, a number or an array."""
        owner = self.owners[world_rank]
        if owner == 0:
            return local_ns
        before = self.before[owner]
        ahead = before.offset_ns + self.drift(owner) * (local_ns - before.local_ns)
        return local_ns - np.rint(ahead).astype(np.int64)

    def drift(self, world_rank: int) -> float:
        """Return the nanoseconds that the rank's clock gains per nanosecond."""
        owner = self.owners[world_rank]
        if owner not in self.after:
            return 0.0
        before, after = self.before[owner], self.after[owner]
        return (after.offset_ns - before.offset_ns) / max(1, after.local_ns - before.local_ns)

    def error_ns(self, world_rank: int) -> float:
        """Return how far a translated time between the two measurements may be off."""
        owner = self.owners[world_rank]
        samples = [part[owner] for part in (self.before, self.after) if owner in part]
        return max((sample.error_ns for sample in samples), default=0.0)

    def largest_error_ns(self) -> float:
        """Return how far the distance between times of any two ranks may be off."""
        return sum(sorted(map(self.error_ns, set(self.owners)))[-2:])

    def describe(self) -> str:
        """Return one sentence for the header of a report."""
        clocks = set(self.owners)
        if len(clocks) == 1:
            return "one host: its monotonic clock as it is"
        worst = max(abs(self.drift(owner)) for owner in clocks)
        drift = f"drift up to {worst * 1e6:.2f} us/s taken out" if self.after else "drift unknown"
        return (
            f"{len(clocks)} clocks: offsets by ping-pong (shortest of {ROUND_TRIPS}), {drift};"
            f" good to +-{self.largest_error_ns() * 1e-3:.1f} us"
        )
