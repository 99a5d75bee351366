"""Every case of bench.interconnect on every transport: payloads are right, and wrong ones detected.

Device memory is a stand-in (fake_cupy, fake_nccl): it shows that the calls fit, but not CUDA.
"""

import types
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI
from small_model import cpu, slow_unless
from stand_in import put_in_nccl

from bench.interconnect import compiled, overlap, plans, sampling, session
from bench.interconnect.buffers import POLICIES, Arena
from bench.interconnect.cases import (
    ALGORITHMS,
    BARE,
    BY,
    COMM,
    IN_C,
    IN_WINDOW,
    PERSISTENT,
    Setup,
    UnevenAllToAll,
)
from bench.interconnect.groups import comms_by, make_group
from bench.interconnect.plans import Job
from bench.interconnect.routing import ROUTINGS
from bench.interconnect.sampling import Plan, Progress, measure_cases
from mpipar import ops as ops_module
from mpipar.comm.algorithms.doubling import Doubling
from mpipar.comm.record import Recorder
from mpipar.errors import EnvironmentProblem

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.ranks(2, 4)
SESSION = types.SimpleNamespace(
    world=WORLD, agree=lambda function: function(), host_rank=0, host_ranks=range(WORLD.size)
)
PLAN = Plan(warm_up=0, exactly=1)
USUAL = (COMM, BARE, PERSISTENT, ALGORITHMS)


@pytest.fixture(autouse=True)
def one_sample_of_each_way(monkeypatch):
    """A payload is checked before the first sample: more samples would show nothing."""
    monkeypatch.setattr(sampling, "LEAST_TURNS", 1)
    monkeypatch.setattr(overlap, "TRIALS", 1)


def sections():
    cases = [case for case in plans.CASES if case != "pairs"]
    return plans.world_sections(cases, WORLD.size, (48,))


def outcomes(section, job=None, ops=None, loops=None, window=3):
    """{way: Outcome} of this rank; {} if it is in no group. Comm: the section."""
    job, ops = job or Job(), ops or cpu("float32")
    group = make_group(section.groups, section.axis, job.transport, ops, WORLD, Recorder())
    found = {}
    if group.team is not None:
        setup = Setup(
            group.comm,
            group.mpi,
            Arena(ops, job.buffers, 1 << 12),
            section.sizes[0],
            window,
            loops,
            partial(comms_by, group.mpi, ops, Recorder()),
        )
        cases = {via: section.make(setup, via) for via in job.ways(section)}
        if section.num_tests is not None:
            cases = overlap.with_computing(group.team, section, setup, cases, Progress())
        found = measure_cases(group.team, cases, PLAN, Progress(), lambda: False)
        for case in cases.values():
            case.close()
        group.close()
    return found


def right_outcomes(section, *more, **named):
    """`outcomes`, whose payloads must be right."""
    found = outcomes(section, *more, **named)
    assert {via: one.problems for via, one in found.items() if one.problems} == {}, section.title
    return found


@pytest.mark.parametrize(
    "policy",
    slow_unless(
        lambda policy: WORLD.size == 2 or policy == "rotated", [(policy,) for policy in POLICIES]
    ),
)
def test_payload_of_every_case_through_host_memory(policy):
    chosen, job = sections(), Job(buffers=policy, kinds=USUAL)
    names = {one.case.name for one in chosen if job.ways(one)}
    assert names >= {*plans.PAIR_CASES, *plans.GROUP_CASES}
    for section in chosen:
        for outcome in right_outcomes(section, job).values():
            assert len(outcome.entered) == len(outcome.left) >= 1
            assert np.all(np.subtract(outcome.left, outcome.entered) > 0)


def test_parts_of_every_routing_arrive():
    plain = plans.world_sections(["all-to-allv"], WORLD.size, (48 * WORLD.size,))
    for section in plans.routed(plain, ROUTINGS):
        right_outcomes(section, Job(buffers="reused", kinds=USUAL))


@pytest.mark.parametrize("size", [0, 48])
def test_payload_of_sixteen_bits_and_of_no_bytes(size):
    """MPI knows no bfloat16: bare calls move it, and only mpipar.comm adds it."""
    ops = cpu("bfloat16")
    job = Job("bfloat16", "reused", kinds=USUAL)
    chosen = [one for one in sections() if job.ways(one)]
    names = {one.case.name for one in chosen}
    assert {"latency", "all-reduce", "gather", "all-to-allv", "multi-bandwidth"} <= names
    assert not {"iall-reduce", "reduce"} & names
    for section in chosen:
        found = right_outcomes(section._replace(sizes=(size,)), job, ops)
        assert not section.case.sums or found.keys() == {COMM}


def test_loops_in_c_move_the_same_payload(monkeypatch):
    try:
        compiled.wrapper()  # every rank asks, so that all skip alike
    except EnvironmentProblem as error:
        pytest.skip(str(error))
    loops = compiled.loops_of(SESSION)
    names = ["latency", "bandwidth", "bidirectional", "multi-bandwidth", "all-reduce"]
    for section in plans.world_sections(names, WORLD.size, (48,)):
        for policy in ("osu", "rotated"):
            job = Job(buffers=policy, kinds=(IN_C,))
            # More than 8192 messages at once overwrote memory. Each takes turns with other ranks.
            window = 20_000 if (section.case.name, policy) == ("bandwidth", "osu") else 100
            for outcome in right_outcomes(section, job, None, loops, window).values():
                assert np.all(np.subtract(outcome.left, outcome.entered) > 0)
    monkeypatch.setattr(compiled, "run", lambda *_, **__: None)  # nothing is sent
    (section,) = plans.world_sections(["all-reduce"], WORLD.size, (48,))
    assert outcomes(section, Job(buffers="osu", kinds=(IN_C,)), loops=loops)[IN_C].problems


@pytest.mark.parametrize("transport", ["staged", "mpi-cuda", "nccl"])
def test_payload_of_every_case_from_device_memory(transport, monkeypatch):
    put_in_nccl(monkeypatch)
    ops = ops_module.make("cuda", "float64")
    job = Job("float64", transport=transport)
    chosen = [one for one in sections() if job.ways(one)]
    if transport == "staged" and WORLD.size == 2:  # products run while a copy is under way
        monkeypatch.setitem(overlap.SIDES, "cuda", 8)
        chosen += plans.overlapped([one for one in chosen if one.title == "ring"], 2)
    for section in chosen:
        right_outcomes(section, job, ops)


def test_wrong_payload_of_one_rank_is_everybodys():
    (section,) = plans.world_sections(["all-gather"], WORLD.size, (48,))
    make = section.make

    class Wrong(make):
        def through_comm(self, x, y):
            def gather_wrong():
                y = self.comm.all_gather(x, "")
                if self.index == WORLD.size - 1:
                    y.flat[-1] += 1
                return y

            return gather_wrong

    found = outcomes(section._replace(make=Wrong))
    assert found[COMM].problems
    assert found[COMM].entered == []
    assert found["mpi4py"].problems == []


def test_an_algorithm_that_adds_wrong_numbers_shows(monkeypatch):
    (section,) = plans.world_sections(["all-reduce"], WORLD.size, (48,))
    job = Job(kinds=(COMM, ALGORITHMS))
    assert [*right_outcomes(section, job)] == [COMM, *BY, IN_WINDOW]
    monkeypatch.setattr(Doubling, "summed", lambda doubling, x: iter(()))
    found = outcomes(section, job)
    assert [via for via, outcome in found.items() if outcome.problems] == ["by doubling"]


def test_hot_expert_gets_twice_as_much_as_each_other():
    ops = cpu()
    group = make_group((tuple(range(WORLD.size)),), "world", "mpi-host", ops, WORLD, Recorder())
    case = UnevenAllToAll(Setup(group.comm, group.mpi, Arena(ops, "reused", 1 << 12), 256), COMM)
    volume, others = case.volume(), WORLD.size - 1
    group.close()
    received = 256 if WORLD.rank == 0 else 128
    sent_on = 128 // WORLD.size * (others if WORLD.rank == 0 else others + 1)
    assert volume == {
        "size_bytes": 256,
        "bytes_in": 128 + 128 // WORLD.size,
        "bytes_out": received,
        "wire_bytes": sent_on,
        "least_to_peer_bytes": 128 // WORLD.size,
        "most_to_peer_bytes": 256 // WORLD.size,
    }


@pytest.mark.parametrize(
    ("title", "sent"),
    [  # messages of the first rank, of a last one
        ("latency", (1, 1)),
        ("bandwidth", (1, 0)),
        ("bidirectional", (1, 1)),
        ("ring", (1, 1)),
        ("fan-in", (0, 1)),
        ("fan-out", (WORLD.size - 1, 0)),
        ("stage-chain hops 1f1b", (1, 1)),
        ("stage-chain hops interleaved", (2, 2)),
    ],
)
def test_bytes_on_the_wire_are_those_that_a_rank_sends(title, sent):
    ops = cpu("float32")
    chosen = plans.world_sections([title.split()[0]], WORLD.size, (48,))
    (section,) = [one for one in chosen if one.title == title]
    group = make_group(section.groups, section.axis, "mpi-host", ops, WORLD, Recorder())
    if group.comm is not None:
        case = section.make(Setup(group.comm, group.mpi, Arena(ops, "reused", 1 << 12), 48), COMM)
        if case.index in (0, case.ranks - 1):
            wanted = 48 * sent[case.index > 0]
        else:
            wanted = 96 if title.startswith("stage-chain") else 48 * sent[1]
        volume = case.volume()
        group.close()
        assert volume["wire_bytes"] == volume["bytes_in"] == wanted
        if title.startswith("stage-chain"):
            assert volume["counted_bytes"] == wanted  # the busiest rank's counts, see _row


def test_hosts_with_other_caches_walk_through_as_much(monkeypatch):
    """Otherwise one would send more messages in a sample than the other receives."""
    monkeypatch.setattr(session, "cache_bytes", lambda: (WORLD.rank + 1) << 16)
    bench = session.Bench(SESSION, Job(), 0, PLAN)
    assert bench.arena.footprint == WORLD.size << 16


@pytest.mark.parametrize(
    "num_tests", slow_unless(lambda num_tests: WORLD.size == 2 or num_tests, [(0,), (3,)])
)
def test_what_is_overlapped_is_checked_too(num_tests, monkeypatch):
    beside = {COMM + overlap.BESIDE, "mpi4py" + overlap.BESIDE}
    everything = plans.world_sections(plans.POSTED_CASES, WORLD.size, (48,))
    chosen = plans.overlapped(everything, num_tests)

    def wrong_ways():
        """For each section that this rank is in."""
        found = [outcomes(section) for section in chosen]
        found = [ways for ways in found if ways]
        assert all(ways.keys() == {COMM, "mpi4py", overlap.COMPUTING, *beside} for ways in found)
        return [{via for via in ways if ways[via].problems} for ways in found]

    right = wrong_ways()
    assert len(right) >= 4
    assert not any(right)

    monkeypatch.setattr(overlap.Work, "beside", lambda work, case: None)
    assert wrong_ways() == [beside] * len(right)
