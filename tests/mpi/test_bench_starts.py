"""The start of bench.interconnect's iterations: a planted skew is shown, or removed."""

import time

import numpy as np
import pytest
from mpi4py import MPI

from bench.interconnect.cases import Case
from bench.interconnect.sampling import (
    BarrierStart,
    DeadlineStart,
    NoStart,
    Plan,
    Progress,
    batch,
    measure_cases,
)

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.ranks(2)
PLANTED_NS = 600_000
MISSED_SECONDS = 0.01  # longer than the lead of any deadline
COUNT, ATTEMPTS = 40, 5


def sleep_ns(duration):
    end = time.perf_counter_ns() + duration
    while time.perf_counter_ns() < end:
        pass


class SlowBarrier:
    """The world, but the last rank leaves each barrier late."""

    def __init__(self):
        self.rank, self.Bcast, self.Allreduce = WORLD.rank, WORLD.Bcast, WORLD.Allreduce

    def Barrier(self):
        WORLD.Barrier()
        if WORLD.rank == WORLD.size - 1:
            sleep_ns(PLANTED_NS)


class Nothing:
    """A case that sends nothing, so that only the start is measured."""

    name, via, sync = "nothing", "mpipar.comm", None
    setup = type("Setup", (), {"size": 0})
    ops = type("Ops", (), {"device": "cpu"})
    laid_out, planned = Case.laid_out, Case.planned

    def prepare(self):
        pass

    def run(self):
        sleep_ns(50_000)


def skews(sync, team, ahead_ns=0):
    """Median ns between the ranks' entries into the iterations that were in time."""
    plan = Plan(budget=0.01, warm_up=2, least=COUNT, check=False, sync=sync)
    outcome = measure_cases(team, {"": Nothing()}, plan, Progress(), lambda: False, ahead_ns)[""]
    entered = np.array(WORLD.allgather(outcome.entered))
    late = sorted({one for each in WORLD.allgather(outcome.late) for one in each})
    assert entered.shape[1] >= COUNT
    apart = np.ptp(np.delete(entered, late, axis=1), axis=0)
    return np.median(apart) if len(apart) else np.inf


def some_attempt(accepted, *arguments):
    """Try several times, because a loaded machine takes cores away; all ranks retry together."""
    return any(accepted(skews(*arguments)) for _ in range(ATTEMPTS))


@pytest.mark.alone
def test_slow_exit_from_a_barrier_is_skew_and_a_deadline_takes_it_out():
    # A little less than planted: the other rank's own way out of the barrier takes time too.
    assert skews("barrier", SlowBarrier()) >= 0.9 * PLANTED_NS
    assert some_attempt(lambda skew: skew < PLANTED_NS / 10, "deadline", SlowBarrier())


@pytest.mark.alone
def test_deadline_is_an_instant_of_the_common_clock():
    ahead_ns = PLANTED_NS if WORLD.rank == 1 else 0  # a clock that is ahead: it starts too late
    assert some_attempt(
        lambda skew: abs(skew - PLANTED_NS) < PLANTED_NS / 10, "deadline", WORLD, ahead_ns
    )


def test_iteration_whose_deadline_was_missed_is_flagged():
    start, missed = DeadlineStart(WORLD), []
    start.begin()
    for number in range(COUNT):
        if number % 5 == 3 and WORLD.rank == 1:
            start.now = lambda: time.sleep(MISSED_SECONDS) or time.perf_counter_ns()
        late = start.wait()
        vars(start).pop("now", None)
        missed.append(late)
    planted = {number for number in range(COUNT) if number % 5 == 3}
    found = {number for number, late in enumerate(missed) if late}
    if WORLD.rank == 1:
        assert planted <= found
    else:  # a machine under load may take the core from this rank, but not each time
        assert len(found & planted) < len(planted)


@pytest.mark.parametrize("start", [NoStart, BarrierStart])
def test_only_a_barrier_makes_ranks_wait_for_each_other(start):
    class Ahead(Nothing):
        calls = 0

        def run(self):
            """Without a barrier rank 1 ends its first iteration in the last one of rank 0."""
            self.calls += 1
            if start is NoStart and (WORLD.rank, self.calls) == (0, 5):
                WORLD.send(None, 1)
            elif start is NoStart and (WORLD.rank, self.calls) == (1, 1):
                WORLD.recv(source=0)

    _, left, _ = batch(start(WORLD), Ahead(), 5, Progress())
    first, last = WORLD.allgather(left)
    assert (first[-2] < last[0]) == (start is NoStart)
