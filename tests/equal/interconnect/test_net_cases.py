"""Every case of mpipar net on every transport: payloads are right, and wrong ones detected.

Device memory is a stand-in (fake_cupy, fake_nccl): it shows that the calls fit, but not CUDA.
"""

import types

import numpy as np
import pytest
from fake_cupy import put_in_nccl
from mpi4py import MPI
from small_model import cpu, slow_unless

from mpipar import ops as ops_module
from mpipar.comm.algorithms.steps import RecursiveDoublingTransport
from mpipar.comm.group import Comm
from mpipar.comm.mpi import PollingRequest
from mpipar.comm.recorder import Recorder
from mpipar.errors import EnvironmentProblem
from mpipar.interconnect import compiled, hosts, job, measure
from mpipar.interconnect.arguments import BY, CASES, ROUTINGS, Arguments
from mpipar.interconnect.cases import BARE, COMM, IN_C, At
from mpipar.interconnect.cases import CASES as TABLE
from mpipar.interconnect.groups import make_team, world_sections
from mpipar.interconnect.measure import Arena, Operation, Plan, Progress

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.ranks(2, 4)
SESSION = types.SimpleNamespace(
    world=WORLD, agree=lambda function: function(), host_rank=0, host_ranks=range(WORLD.size)
)
PLAN = Plan(warm_up=1, exactly=1)


@pytest.fixture(autouse=True)
def one_sample_of_each_way(monkeypatch):
    """A payload is checked before the first sample: more samples would show nothing."""
    monkeypatch.setattr(measure, "LEAST_TURNS", 1)


def measured(name, size=48, ops=None, loops=None, room=1 << 12, more=lambda *_: None, **flags):
    """{way: Samples} of this rank; {} if it is in no group. Comm: the case, and what more sends."""
    args, ops = Arguments(**flags), ops or cpu("float32")
    (section,) = world_sections([TABLE[name]], WORLD.size)
    ways = job.ways_of(args, section)
    algorithms = [via.removeprefix("by ") for via in ways if via in BY]
    team = make_team(section, args.transport, ops, WORLD, Recorder(), algorithms)
    if team is None:
        return {}
    operations = {}
    for via in ways:
        comm = team.comms[via.removeprefix("by ") if via in BY else "mpi"]
        at = At(comm, team.mpi, ops, size, args.window, room, args.routing or "hot")
        operations[via] = Operation(section.case, at, via, Arena(ops, room), loops)
    found = measure.measure(team.team, operations, PLAN, Progress(), lambda: False)
    more(team, operations)
    team.close()
    return found


def right(name, *more, **named):
    """`measured`, whose payloads must be right."""
    found = measured(name, *more, **named)
    assert not {via: one.wrong for via, one in found.items() if one.wrong}, name
    for one in found.values():
        assert len(one.entered) == len(one.left) == 1
        assert np.all(np.subtract(one.left, one.entered) > 0)
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("room", [0, 1 << 12])
def test_payload_of_every_case_through_host_memory(name, room):
    for size in (0, 8, 48, 4100):
        found = right(name, size, room=room, via="comm,mpi4py,algorithms")
        if found:
            assert found.keys() == {COMM, BARE, *(BY if name == "all-reduce" else ())}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_parts_of_every_routing_arrive(routing):
    right("all-to-allv", 48 * WORLD.size, routing=routing)


@pytest.mark.parametrize("name", [name for name in CASES if name != "iall-reduce"])
def test_sixteen_bits_travel_through_comm_alone(name):
    found = right(name, ops=cpu("bfloat16"), dtype="bfloat16")
    assert {*found} <= {COMM}


def test_loops_in_c_move_the_same_payload(monkeypatch):
    try:
        compiled.compiled()  # every rank asks, so that all skip alike
    except EnvironmentProblem as error:
        pytest.skip(str(error))
    loops = compiled.loops_of(SESSION)
    for name in ("latency", "bandwidth", "bidirectional", "all-reduce"):
        for room in (0, 1 << 12):
            # More than 8192 messages at once overwrote memory.
            window = 20_000 if (name, room) == ("bandwidth", 0) else 100
            right(name, 48, None, loops, room, via="c", window=window)
    monkeypatch.setattr(loops, "run", lambda *_, **__: None)  # nothing is sent
    monkeypatch.setattr(Operation, "batch", lambda *_: (np.zeros(1), np.ones(1)))
    assert measured("all-reduce", loops=loops, via="c")[IN_C].wrong


@pytest.mark.parametrize("transport", ["staged", "mpi-cuda", "nccl"])
def test_payload_of_every_case_from_device_memory(transport, monkeypatch):
    put_in_nccl(monkeypatch)
    ops = ops_module.make("cuda", "float64")
    for name in CASES:
        right(name, 48, ops, dtype="float64", transport=transport)


def test_wrong_payload_of_one_rank_is_not_timed(monkeypatch):
    plain = Comm.all_gather

    def wrong(comm, x, name):
        y = plain(comm, x, name)
        y.flat[-1] += comm.group_rank == comm.size - 1
        return y

    monkeypatch.setattr(Comm, "all_gather", wrong)
    found = measured("all-gather")
    assert bool(found[COMM].wrong) == (WORLD.rank == WORLD.size - 1)
    assert found[COMM].entered == []
    assert found[BARE].wrong == ""
    assert len(found[BARE].entered) == 1


def test_an_algorithm_that_adds_wrong_numbers_shows(monkeypatch):
    monkeypatch.setattr(RecursiveDoublingTransport, "all_reduce", lambda *_: None)
    found = measured("all-reduce", via="comm,algorithms")
    assert [via for via, one in found.items() if one.wrong] == ["by doubling"]


def test_a_message_that_arrives_twice_shows(monkeypatch):
    """All buffers of a window would be right but one."""
    plain = Comm.isend

    def same(comm, x, peer, tag, name):
        return plain(comm, x if x[0] != 13 else np.zeros_like(x), peer, tag, name)

    monkeypatch.setattr(Comm, "isend", same)
    found = measured("bandwidth", size=48, window=4)
    last = WORLD.rank == WORLD.size - 1
    assert not found or bool(found[COMM].wrong) == last


def test_hosts_with_other_caches_walk_through_as_much(monkeypatch):
    """Otherwise one would send more messages in a sample than the other receives."""
    monkeypatch.setattr(hosts, "cache_bytes", lambda: (WORLD.rank + 1) << 16)
    bench = job.Bench(SESSION, Arguments(words=("latency",), end_bytes=64))
    assert bench.arena.room == WORLD.size << 16


def test_ranks_that_share_cores_wait_as_in_training():
    for crowded in (False, True):
        (section,) = world_sections([TABLE["ring"]], WORLD.size)
        team = make_team(section, "mpi-host", cpu("float32"), WORLD, Recorder(), [], crowded)
        request = team.comms["mpi"].transport.irecv(np.zeros(1, np.float32), team.mpi.rank, 3)
        assert isinstance(request, PollingRequest) == crowded
        team.mpi.Send(np.ones(1, np.float32), team.mpi.rank, 3)
        request.Wait()
        team.close()


@pytest.mark.parametrize("num_tests", slow_unless(lambda one: one, [(0,), (3,)]))
def test_overlap_of_a_posted_sum(num_tests):
    columns = []

    def more(team, operations):
        columns.extend(
            measure.overlap(team.team, one, num_tests, Progress()) for one in operations.values()
        )

    right("iall-reduce", 1 << 16, more=more)
    assert len(columns) == 2
    for one in columns:
        assert one["num_tests"] == num_tests
        assert 0 <= one["overlap_percent"] <= 100
        assert one["alone_us"] > 0
