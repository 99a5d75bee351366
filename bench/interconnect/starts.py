"""How the ranks of a team begin an iteration: after a `barrier`, at a `deadline`, or at once.

Ranks leave a barrier one after the other. Their distance is added to a short operation or hidden in
it. A deadline is an instant on the common clock, far enough ahead for every rank to hear of it. A
rank that has not heard of it is late, and the iteration does not count. Between hosts that clock is
an estimate: starts differ by up to its error, and no time on that clock shows it. With `none` calls
follow each other as fast as they can. That gives throughput, not the time of one call.
"""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np

TRIALS = 10  # messages that determine the lead of a deadline
LEAD = 2  # times the slowest of them
LEAST_LEAD_NS, MOST_LEAD_NS = 10_000, 2_000_000
LATE_NS = 5_000  # after the deadline: this rank had not heard of it in time, or had no core


class BarrierStart:
    """Starts each iteration after a barrier. barrier: of this communicator; None for none."""

    def __init__(self, team, ahead_ns: int = 0):
        self.team = self.barrier = team

    def begin(self) -> None:
        """Prepare a batch of iterations; here nothing is needed."""

    def wait(self) -> bool:
        """Wait for an iteration; whether this rank is too late. Comm: a barrier of the team."""
        self.team.Barrier()
        return False


class NoStart(BarrierStart):
    """A barrier before each batch; its iterations follow each other."""

    def __init__(self, team, ahead_ns: int = 0):
        super().__init__(team)
        self.barrier = None

    def begin(self) -> None:
        """Comm: a barrier of the team."""
        self.team.Barrier()

    def wait(self) -> bool:
        return False


class DeadlineStart(BarrierStart):
    """A start at an instant that the team's first rank names.

    ahead_ns: this rank's clock minus the common one.
    """

    def __init__(self, team, ahead_ns: int = 0):
        super().__init__(team)
        self.ahead_ns, self.lead_ns = ahead_ns, 0
        self.message = np.zeros(1, np.int64)

    def now(self) -> int:
        """The time on the common clock."""
        return perf_counter_ns() - self.ahead_ns

    def tell(self) -> None:
        """Give all ranks the first rank's time plus the lead. Comm: a barrier and a broadcast."""
        self.team.Barrier()
        self.message[0] = self.now() + self.lead_ns
        self.team.Bcast(self.message, root=0)

    def begin(self) -> None:
        """Measure how long this message takes. Comm: `tell` TRIALS times, one all-reduce."""
        from mpi4py import MPI

        self.lead_ns, slowest = 0, np.zeros(1, np.int64)
        for _ in range(TRIALS):
            self.tell()
            slowest[0] = max(slowest[0], self.now() - self.message[0])
        self.team.Allreduce(MPI.IN_PLACE, slowest, op=MPI.MAX)
        self.lead_ns = min(max(LEAD * int(slowest[0]), LEAST_LEAD_NS), MOST_LEAD_NS)

    def wait(self) -> bool:
        """Comm: `tell`."""
        self.tell()
        deadline = int(self.message[0])
        while self.now() < deadline:
            pass
        return self.now() > deadline + LATE_NS


STARTS = {"barrier": BarrierStart, "deadline": DeadlineStart, "none": NoStart}
MEANING = {
    "barrier": "barrier before each iteration",
    "deadline": "agreed instant on the common clock; late iterations do not count",
    "none": "iterations follow each other: throughput, not the time of one call",
}
