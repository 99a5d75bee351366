"""Takes samples: ranks start together; every time is kept, and none is averaged.

An operation can be run in several ways: through mpipar.comm, or by bare calls. The ways take turns
in short batches, so that a slow spell of the machine hits all of them. One rank of the team decides
how many more samples each needs and tells the others, so that no rank leaves a loop alone.

The ranks of a team begin an iteration after a `barrier`, at a `deadline`, or immediately. Ranks
leave a barrier one after the other, and this spread is added to a short operation or hidden in it.
A deadline is a moment on the common clock, far enough ahead for every rank to hear of it. A rank
that has not heard of it is late, and the iteration does not count. Between hosts that clock is an
estimate: starts differ by up to its error, and no time on that clock shows it. With `none` calls
follow each other as fast as they can, which gives throughput, not the time of one call.
"""

from __future__ import annotations

import gc
from time import perf_counter, perf_counter_ns
from typing import NamedTuple

import numpy as np

from bench.interconnect.cases import IN_C
from bench.interconnect.groups import largest
from bench.interconnect.statistics import half_width

TURNS = 10  # per budget: how often the ways take turns, and how soon a Ctrl-C is noticed
LEAST_TURNS = 5  # so that one slow spell of the machine never covers all samples of a way
ELSEWHERE = "payload wrong on another rank"
MOST = 2000  # iterations kept: the file keeps each, and more would not improve a median


class Plan(NamedTuple):
    """Limits of one way. budget: seconds for a size. target: half the median's interval over the
    median.

    least: the least number of iterations. warm_up: iterations that are not kept. sync: how they
    start. exactly: the number of iterations, whatever time and target say; 0: these decide. most:
    iterations that are kept.
    """

    budget: float = 1.0
    target: float = 0.02
    least: int = 20
    warm_up: int = 5
    check: bool = True
    sync: str = "barrier"
    exactly: int = 0
    most: int = MOST


class Progress:
    """The progress that the watchdog observes."""

    def __init__(self):
        self.count, self.doing = 0, "starting"

    def advance(self) -> None:
        """Say that something has been done."""
        self.count += 1


class Outcome(NamedTuple):
    """The result of one way on this rank.

    It has times (ns of its own clock), problems of the payload, and the numbers of the iterations
    that this rank started too late.
    """

    entered: list
    left: list
    problems: list
    late: list

    def add(self, entered, left, late) -> None:
        """Append a batch."""
        self.late.extend(len(self.entered) + number for number in late)
        self.entered.extend(entered.tolist())
        self.left.extend(left.tolist())


def enough(durations_s, spent_s: float, plan: Plan) -> bool:
    """Return whether one way has been measured precisely enough, or for long enough."""
    count = len(durations_s)
    if plan.exactly:
        return count >= plan.exactly
    if count >= plan.least and (spent_s >= plan.budget or half_width(durations_s) <= plan.target):
        return True
    return count >= plan.most or spent_s >= 4 * plan.budget


def batch_size(durations_s, plan: Plan, kept: int = 0) -> int:
    """Return how many iterations take one turn's share of the budget; kept: how many there are."""
    if plan.exactly:
        return min(-(-plan.exactly // TURNS), plan.exactly - kept)
    if not len(durations_s):
        return 1
    typical = max(float(np.median(durations_s)), 1e-7)
    return max(1, min(plan.most // TURNS, int(plan.budget / TURNS / typical)))


def batch(start, case, count: int, progress) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Run `count` iterations; return this rank's times, and which began late. Comm: the start's."""
    entered, left, late = np.empty(count, np.int64), np.empty(count, np.int64), []
    settle = case.ops.synchronize if case.ops.device != "cpu" else None
    start.begin()
    if case.via == IN_C and count:
        entered, left = case.in_c(start.barrier, count)
        progress.count += count
        return entered, left, []
    for number, run in enumerate(case.laid_out(count)):
        if settle:
            settle()
        if start.wait():
            late.append(number)
        begun = perf_counter_ns()
        run()
        if settle:
            settle()
        left[number] = perf_counter_ns()
        entered[number] = begun
        progress.count += 1
    return entered, left, late


def checked(team, case) -> list[str]:
    """Return the problems of the payload; a problem on one rank is reported on all.

    Comm: the case, and one all-reduce over the team.
    """
    problems = case.check()
    (most,) = largest(team, [len(problems)])
    return problems or ([ELSEWHERE] if most else [])


def measure_cases(
    team, cases: dict, plan: Plan, progress, stopping, ahead_ns: int = 0
) -> dict[str, Outcome]:
    """Return {way: Outcome} of this rank; all ways continue until each has enough.

    stopping(): whether this rank was asked to end. ahead_ns: this rank's clock minus the common
    one. Comm: the cases; on the team the start of each iteration and one all-reduce for each turn.
    """
    found, plans = {}, {via: case.planned(plan) for via, case in cases.items()}
    starts = {via: STARTS[case.sync or plan.sync](team, ahead_ns) for via, case in cases.items()}
    for via, case in cases.items():
        progress.doing = f"check of {case.name}, {case.setup.size} bytes, {via}"
        found[via] = Outcome([], [], checked(team, case) if plan.check else [], [])
    running = [via for via in cases if not found[via].problems]
    counts, spent = [plan.warm_up] * len(running), dict.fromkeys(running, 0.0)
    gc.disable()
    for turn in range(MOST if running else 0):  # turn 0 is the warm-up and is not kept
        orders = []
        for via, count in zip(running, counts, strict=True):
            progress.doing = f"{cases[via].name}, {cases[via].setup.size} bytes, {via}"
            start = perf_counter()
            entered, left, late = batch(starts[via], cases[via], count, progress)
            if turn:
                spent[via] += perf_counter() - start
                found[via].add(entered, left, late)
            orders.append(batch_size((left - entered) * 1e-9, plans[via], len(found[via].left)))
        kept = {via: np.subtract(found[via].left, found[via].entered) * 1e-9 for via in running}
        done = turn >= LEAST_TURNS and all(
            enough(kept[via], spent[via], plans[via]) for via in running
        )
        first = team.rank == 0
        *counts, going, stopped = largest(
            team,
            [  # all but the first rank give 0
                *(count * first for count in orders),
                first and not done,
                stopping(),
            ],
        )
        if stopped or not going:
            break
    gc.enable()
    return found


def on_common_clock(facts, ranks, via: str, clock) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, ranks) entered and left on the clock of world rank 0, ns."""
    columns = [
        [[clock.common_ns(number, time) for time in facts[number][via][part]] for number in ranks]
        for part in (0, 1)
    ]
    return tuple(np.array(column, np.int64).T for column in columns)


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
        """Wait for an iteration; return whether this rank is late. Comm: a barrier of the team."""
        self.team.Barrier()
        return False


class NoStart(BarrierStart):
    """A barrier before each batch; its iterations follow each other."""

    def __init__(self, team, ahead_ns: int = 0):
        super().__init__(team)
        self.barrier = None

    def begin(self) -> None:
        """Wait for all ranks. Comm: a barrier of the team."""
        self.team.Barrier()

    def wait(self) -> bool:
        return False


class DeadlineStart(BarrierStart):
    """A start at a moment that the team's first rank announces.

    ahead_ns: this rank's clock minus the common one.
    """

    def __init__(self, team, ahead_ns: int = 0):
        super().__init__(team)
        self.ahead_ns, self.lead_ns = ahead_ns, 0
        self.message = np.zeros(1, np.int64)

    def now(self) -> int:
        """Return the time on the common clock."""
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
        """Wait for the deadline; return whether this rank is too late. Comm: `tell`."""
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
