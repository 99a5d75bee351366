"""The clock measurement under MPI, waits on shared cores, and our own calls on the way to MPI."""

import sys
import time
from pathlib import Path
from time import perf_counter_ns, sleep
from types import SimpleNamespace

import numpy as np
import pytest
from small_model import WORLD, comms_of, small_config, worker_and_rows

import mpipar
from mpipar.comm import groups, mpi
from mpipar.comm.objects import gather_objects
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
    facts = gather_objects(
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


# --- ranks that share cores: how they wait for each other without taking the others' time


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("axis", "crowded", "sleeps"),
    [
        ("world", True, True),
        ("world", False, False),
        ("dp", True, False),  # of one stage: its ranks come together
    ],
)
def test_a_rank_whose_stage_is_done_early_sleeps_before_a_sum(axis, crowded, sleeps, monkeypatch):
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(mpi, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(groups, "shares_cores", lambda world: crowded)
    monkeypatch.setattr(groups, "use_batch_scheduling", lambda: None)
    comms = comms_of(axes={"pp": 2, "dp": 2})
    comm = comms.groups[axis]
    last = comm.group_rank == comm.size - 1
    if last:
        time.sleep(0.05)
    total = comm.all_reduce(np.array([2.0**WORLD.rank]), "sum")
    assert total == sum(2.0**rank for rank in comm.ranks)
    comms.close()
    assert last or bool(naps) == sleeps


# --- how many of our own calls lie between a training step and MPI


PACKAGE = str(Path(mpipar.__file__).parent)
MOST = {"block1.ffn.down": 10, "grads.bucket": 9}


def own_calls(frame):
    """(function, file) of ours, from `Worker.train_step` to a frame's."""
    found = []
    while frame:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            found.append((code.co_qualname, code.co_filename.removeprefix(f"{PACKAGE}/")))
        if code.co_qualname == "Worker.train_step":
            return found[::-1]
        frame = frame.f_back
    return []


@pytest.mark.ranks(4)
def test_a_step_reaches_mpi_in_few_calls(monkeypatch):
    """Counted where an algorithm of the transport calls MPI. The page has the same calls."""
    worker, rows = worker_and_rows(small_config((2, 1, 2)))
    seen = {}
    for comm, method in ((worker.comms["tp"], "all_reduce"), (worker.comms["data"], "iall_reduce")):
        transport = comm.transport
        plain = getattr(transport, method)

        def counted(*given, plain=plain, method=method, **named):
            frame = sys._getframe(1)
            name = frame.f_locals.get("name")
            last = f"{type(plain.__self__).__name__}.{method}", "comm/mpi.py"
            seen.setdefault(name, [*own_calls(frame), last])
            return plain(*given, **named)

        monkeypatch.setattr(transport, method, counted)
    worker.train_step(1, lambda mb: rows.train(1, mb))
    for name, most in MOST.items():
        assert 1 < len(seen[name]) <= most, seen[name]
    page = Path(PACKAGE, "../docs/one-step.md").read_text().split("```")[1]
    assert [tuple(line.split()) for line in page.splitlines()[1:]] == seen["block1.ffn.down"]
    worker.close()
