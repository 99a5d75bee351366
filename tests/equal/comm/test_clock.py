"""The clock measurement under MPI, on clocks with planted offset and drift."""

from time import perf_counter_ns, sleep

import pytest
from small_model import WORLD

from mpipar.comm.facts import gather_facts
from mpipar.run.trace.clock import CommonClock, measure_clocks, shared_clocks

HOST = WORLD.rank % 2 if WORLD.size < 8 else WORLD.rank // 3  # "hosts" of several ranks
OFFSET_NS = (0, 7_000_000_000_123, -40_000_000_000_000)[HOST]
DRIFT = (0.0, 80e-6, -30e-6)[HOST]
ORIGIN = WORLD.bcast(perf_counter_ns())


def planted(true_ns):
    """What this rank's clock shows at a true time (all ranks are on one host)."""
    return true_ns + OFFSET_NS + round(DRIFT * (true_ns - ORIGIN))


def clock():
    return planted(perf_counter_ns())


def test_ranks_of_a_host_are_found():
    owners = shared_clocks(WORLD, f"host {HOST}")
    hosts = WORLD.allgather(HOST)
    assert owners == [hosts.index(host) for host in hosts]
    assert shared_clocks(WORLD, "the same") == [0] * WORLD.size


@pytest.mark.ranks(2, 3, 4, 8)
def test_planted_clocks_are_brought_together():
    owners = shared_clocks(WORLD, f"host {HOST}")
    before = measure_clocks(WORLD, owners, clock)
    first = perf_counter_ns()
    sleep(0.3)
    last = perf_counter_ns()
    after = measure_clocks(WORLD, owners, clock)
    true_times = [first, (first + last) // 2, last]
    facts = gather_facts(
        WORLD, {"true": true_times, "shown": [planted(t) for t in true_times], "drift": DRIFT}
    )
    assert bool(before) == (WORLD.rank == 0)
    if WORLD.rank > 0:
        return
    common = CommonClock(tuple(owners), before, after)
    for rank, fact in enumerate(facts):
        error = common.error_ns(rank)
        assert (error == 0) == (owners[rank] == 0)
        for true_ns, shown in zip(fact["true"], fact["shown"], strict=True):
            assert abs(common.common_ns(rank, shown) - true_ns) <= error + 2
        assert abs(common.drift(rank) - fact["drift"]) <= 2 * error / (last - first)


def test_one_clock_is_left_as_it_is():
    assert measure_clocks(WORLD, [0] * WORLD.size, clock) == {}
