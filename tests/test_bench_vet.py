"""bench interconnect vet: slow ranks are named, healthy ones are not."""

import sys
from itertools import combinations

import numpy as np
import pytest
from helpers import REPOSITORY, find_launcher, run_ranks

from bench.interconnect import vet

HOSTS = ["a", "a", "b", "b", "c", "c", "d", "d"]
RANKS = len(HOSTS)


@pytest.mark.parametrize("size", range(3, 10))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(size):
    rounds = vet.rounds_of(size)
    assert sorted(pair for pairs in rounds for pair in pairs) == [*combinations(range(size), 2)]
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


def measured(seed, slow_ranks=(), slow_work=(), slow_pairs=()):
    """(work, pairs, links) of 8 ranks on 4 hosts, with 10 % of noise; what is slow takes twice."""
    rng = np.random.default_rng(seed)
    work = [rng.uniform(1, 1.1) * (2 if rank in slow_work else 1) for rank in range(RANKS)]
    links = {
        pair: "near" if HOSTS[pair[0]] == HOSTS[pair[1]] else "far"
        for pair in combinations(range(RANKS), 2)
    }
    times = {
        pair: rng.uniform(1, 1.1)
        * (10 if kind == "far" else 1)
        * (2 if {*pair} & {*slow_ranks} else 1)
        * (4 if pair in slow_pairs else 1)
        for pair, kind in links.items()
    }
    return work, {"latency": times}, links


def found(*planted, **more):
    return vet.suspects(*measured(*planted, **more), HOSTS, 1.5)


@pytest.mark.parametrize("seed", range(20))
def test_healthy_ranks_are_not_suspected(seed):
    assert found(seed) == []


@pytest.mark.parametrize("seed", range(5))
def test_what_is_planted_is_named(seed):
    slow = found(seed, slow_ranks=(4, 5))
    assert [(one.ranks, one.hosts) for one in slow] == [((4,), ("c",)), ((5,), ("c",))]
    (core,) = found(seed, slow_work=(3,))
    assert (core.ranks, core.what, core.hosts) == ((3,), "computing", ("b",))
    assert core.factor == pytest.approx(2, rel=0.1)
    (pair,) = found(seed, slow_pairs=((1, 6),))
    assert (pair.ranks, pair.what, pair.hosts) == ((1, 6), "latency between them", ())


def test_the_verdict_names_hosts_to_leave_out(capsys):
    places = [{"host": host, "sockets": [0]} for host in HOSTS]
    work, pairs, _ = measured(0, slow_ranks=(4, 5))
    pairs["transfer"] = pairs["latency"]
    assert vet.say((work, pairs), places, 1.5) == 1
    assert capsys.readouterr().out.endswith("\n--exclude=c\n")
    work, pairs, _ = measured(1)
    assert vet.say((work, pairs), places, 1.5) == 0
    assert "no suspects: 8 ranks on 4 hosts" in capsys.readouterr().out
    assert vet.say(measured(0, slow_ranks=(4,))[:2], places, 1.5, crowded=True) == 0
    assert "only computing is compared" in capsys.readouterr().out


SLOW_CORE = """
import os, sys
from bench.interconnect import vet
from mpipar.job.session import guard
plain = vet.work_seconds
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "2":
    vet.work_seconds = lambda exponent: plain(4 * exponent ** 4)
sys.argv = ["vet", *sys.argv[1:]]
guard(vet.main)
"""
needs_launcher = pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]")


@needs_launcher
@pytest.mark.slow
def test_a_rank_with_more_work_is_named():
    done = run_ranks(
        4, [sys.executable, "-c", SLOW_CORE], timeout=100, env={"PYTHONPATH": str(REPOSITORY)}
    )
    assert done.returncode == 1, done.tail()
    assert "suspect: rank 2: computing" in done.stdout
    assert "--exclude" not in done.stdout  # there is one host only


@needs_launcher
@pytest.mark.slow
def test_two_ranks_are_too_few():
    done = run_ranks(
        2,
        [sys.executable, "-m", "bench", "interconnect", "vet"],
        timeout=100,
        env={"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 2, done.tail()
    assert "too few to compare: 2 of at least 3 ranks" in done.stderr
