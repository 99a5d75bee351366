"""Sum algorithms: each against integers and against one rank, and its broken twins."""

import time

import numpy as np
import pytest
from small_model import (
    WORLD,
    comms_of,
    cpu,
    plant,
    slow_unless,
    small_config,
    worker_of,
)

from mpipar.comm import algorithms
from mpipar.comm.algorithms import window
from mpipar.comm.algorithms.steps import RingTransport, add
from mpipar.comm.algorithms.window import TILE, Marks, WindowTransport
from mpipar.comm.groups import Comms
from mpipar.comm.mpi import MpiTransport
from mpipar.comm.recorder import Recorder
from mpipar.comm.transport import Done
from mpipar.config.run import ALL_REDUCES
from mpipar.errors import EnvironmentProblem, HangError

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.usefixtures("poisoned_memory")]
RANKS, HERE = WORLD.size, WORLD.rank
NAMES = [*ALL_REDUCES]
# One element, fewer than ranks, odd ones, and more than a tile of the window.
LENGTHS = (1, 2, 7, 1001, TILE // 8 * 2 + 3)
# Four ranks share two cores in most places: there the slow sessions run the rest.
QUICK = {2: NAMES, 4: ["doubling", "window"]}.get(RANKS, [])
everyone = pytest.mark.parametrize("name", slow_unless(QUICK.__contains__, zip(NAMES)))


@pytest.fixture
def two_hosts(monkeypatch):
    """Let pairs of ranks count as hosts."""
    monkeypatch.setattr(algorithms, "host_of", lambda mpi_comm: mpi_comm.Split(mpi_comm.rank // 2))


def numbers(place: int, length: int) -> np.ndarray:
    """What a rank adds: integers, so that sums are exact in every order."""
    return (np.arange(length) * 7 % 11 + place**2 + 1).astype(float)


def total(length: int) -> np.ndarray:
    return sum(numbers(place, length) for place in range(RANKS))


def comms_for(name: str, recorder=None, **options) -> Comms:
    """One group of all ranks."""
    return comms_of(recorder=recorder, all_reduce=name, **options)


def wrong_sums(name: str, **options) -> int:
    """On any rank: sums of any kind that are wrong, after all orders of waiting."""
    comms = comms_for(name, **options)
    dp, bad = comms["dp"], 0
    for length in LENGTHS:
        arrays = [
            np.empty(length),
            np.empty(length),
            dp.zeros(comms.ops, (length,), "float64", "gradients"),
        ]
        for x in arrays:
            x[:] = numbers(HERE, length)
        pending = [dp.iall_reduce(x, "posted") for x in arrays[1:]]
        dp.all_reduce(arrays[0], "blocking")
        pending[HERE % 2].test()
        for one in pending:
            one.wait()
        bad += sum(not np.array_equal(x, total(length)) for x in arrays)
    comms.close()
    return WORLD.allreduce(bad)


@everyone
@pytest.mark.parametrize("sync_sends", [False, True], ids=["", "sync"])
def test_sums_of_any_length(name, sync_sends):
    assert wrong_sums(name, sync_sends=sync_sends, check=sync_sends) == 0


@pytest.mark.ranks(2)
def test_a_synchronous_send_of_a_worker_waits_for_its_receiver(monkeypatch):
    """Plain messages, and those of an algorithm's steps."""
    monkeypatch.setenv("MPIPAR_SYNC_SENDS", "1")
    worker = worker_of(small_config((2, 1, 1), all_reduce="ring"))
    ring, peer, x, y = worker.comms["dp"].transport, 1 - HERE, np.ones(3), np.empty((2, 3))
    sent = [ring.isend(x, peer, 3), ring.send(3, x, peer)]
    early = [any(one.Test() for _ in range(1000)) for one in sent]
    WORLD.Barrier()
    for one in (ring.irecv(y[0], peer, 3), ring.receive(3, y[1], peer), *sent):
        one.Wait()
    worker.close()
    assert early == [False, False]


def test_memory_that_is_poisoned_is_full_of_nan():
    assert np.isnan(cpu().empty((3,), label="buffers")).all()


@pytest.mark.ranks(4)
def test_between_hosts_a_window_is_left_to_mpi(two_hosts):
    comms = comms_for("window")
    assert type(comms["dp"].transport) is MpiTransport
    comms.close()


@everyone
def test_many_posted_sums_are_waited_for_in_any_order(name):
    """More than there are rows of marks, with every other rank asleep in between."""
    comms = comms_for(name)
    x = comms["dp"].zeros(comms.ops, (600, 3), "float64", "gradients")
    x[:] = numbers(HERE, 3)
    pending = [comms["dp"].iall_reduce(row, "posted") for row in x]
    if HERE % 2:
        time.sleep(0.01)
        pending[3].test()
    for one in pending:
        one.wait()
    assert (x == total(3)).all()
    comms.close()


@everyone
def test_maxima(name):
    comms = comms_for(name)
    x = np.array([HERE, -HERE, 5.0])
    assert comms["dp"].all_reduce(x, "largest", op="max").tolist() == [RANKS - 1, 0, 5]
    comms.close()


@everyone
def test_every_rank_and_run_has_the_same_bits(name):
    rows = []
    for _ in range(2):
        comms = comms_for(name)
        for length in LENGTHS:
            x = np.random.default_rng(HERE).standard_normal(length)
            rows.append(WORLD.allgather(comms["dp"].all_reduce(x, "sum").tobytes()))
        comms.close()
    assert rows[: len(LENGTHS)] == rows[len(LENGTHS) :]
    if name != "mpi":  # what MPI does is MPI's
        assert all(len(set(row)) == 1 for row in rows)


@pytest.mark.parametrize(
    ("name", "replaced", "left"),
    [("room_left", lambda: (1 << 20) + (HERE << 30), 1), ("get_pages", lambda x: HERE > 0, 0)],
)  # another group has taken it meanwhile
def test_too_little_shared_memory_is_said_on_every_rank(name, replaced, left, monkeypatch):
    monkeypatch.setattr(window, name, replaced)
    with pytest.raises(EnvironmentProblem, match=rf"{left} MiB left.*--all-reduce mpi"):
        comms_for("window")


# --- twins: each must be caught by the tests above


def no_fence(_plain, marks, row, mark):
    """A meeting that nobody waits for."""
    marks.own[row][0] = mark
    time.sleep(0.001 * HERE)
    return Done()


def added_twice(plain, window, arrays, row, turn):
    yield from plain(window, arrays, row, turn)
    if HERE == 0:
        add(arrays[0], arrays[0], arrays[0])


def hop_too_many(plain, ring, x):
    yield from plain(ring, x)
    add(x[:1], x[:1], x[:1])


@pytest.mark.parametrize(
    ("name", "kind", "method", "twin"),
    [
        ("window", Marks, "meet", no_fence),
        ("window", WindowTransport, "summed", added_twice),
        ("ring", RingTransport, "summed", hop_too_many),
    ],
)
def test_a_twin_is_caught(name, kind, method, twin, monkeypatch):
    plant(monkeypatch, kind, method, twin)
    assert wrong_sums(name) > 0


# --- the record and the check


def names_of(recorder) -> list[tuple[str, str]]:
    return [(record.operation, record.name) for record in recorder.records]


@pytest.mark.ranks(4)
@everyone
def test_every_algorithm_is_one_barrier(name):
    recorder = Recorder()
    comms = comms_for(name, recorder)
    comms["dp"].all_reduce(np.ones(4), "sum")
    comms["dp"].iall_reduce(np.ones(4), "grads.bucket").wait()
    assert names_of(recorder) == [("all_reduce", "sum"), ("all_reduce", "grads.bucket")]
    comms.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("posted", [False, True])
def test_the_check_names_a_call_that_differs(posted):
    comms = comms_for("halves", check=True)
    call = comms["dp"].iall_reduce if posted else comms["dp"].all_reduce
    with pytest.raises(HangError, match=r"rank 3 calls all_reduce other.*differs"):
        call(np.ones(4), "other" if HERE == 3 else "sum")
    comms.close()
