"""The benchmark across two hosts whose cable has a known rate, which it has to find."""

import re
import subprocess
import sys

import pytest
from helpers import OVERSUBSCRIBED, REPOSITORY, find_launcher, run_command

from bench.interconnect import plans, records
from bench.interconnect.two_hosts import MTU, OVER_TCP, PAYLOAD, missing, two_hosts

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(missing() is not None, reason=f"network namespaces: {missing()}"),
    pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]"),
]
MBIT_PER_SECOND = 200
EXPECTED_GBPS = MBIT_PER_SECOND / 8e3 * PAYLOAD / MTU


def bench(hosts, counts, path, *words):
    """(finished command, its run), with counts[i] ranks on host i."""
    done = run_command(
        hosts.mpiexec(
            find_launcher(),
            counts,
            sys.executable,
            "-m",
            "bench.interconnect",
            *words,
            "--json",
            path,
        ),
        100.0,
        {**OVERSUBSCRIBED, **OVER_TCP, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.tail()
    (run,) = records.read(str(path))
    return done, run


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Messages of three ranks after a barrier, and a ring of two that starts at agreed moments."""
    folder = tmp_path_factory.mktemp("hosts")
    behind = (
        "bandwidth",
        "pairs",
        "--begin-bytes",
        "1M",
        "--end-bytes",
        "2M",
        "--window",
        "4",
        "--seconds",
        "0.2",
    )
    at = (
        "ring",
        "--sync",
        "deadline",
        "--begin-bytes",
        "1K",
        "--end-bytes",
        "1K",
        "--seconds",
        "1",
    )  # who waits for an instant keeps its core: as many ranks as cores
    try:
        with two_hosts(folder, MBIT_PER_SECOND) as hosts:
            return (
                bench(hosts, (2, 1), folder / "behind.jsonl", *behind),
                bench(hosts, (1, 1), folder / "at.jsonl", *at),
            )
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces: {error.stderr.strip()}")


@pytest.fixture
def measured(both):
    """The run that starts after a barrier."""
    return both[0]


def test_bandwidth_is_that_of_the_cable(measured):
    rows = [row for row in measured[1].rows if row["case"] == "bandwidth"]
    assert {row["size_bytes"] for row in rows} == {1 << 20, 2 << 20}
    for row in rows:
        assert row["link"] == "between nodes"
        assert row["algbw_GBps"] == pytest.approx(EXPECTED_GBPS, rel=0.05)


def test_pair_matrix_shows_the_slow_link(measured):
    done, run = measured
    rates = {
        tuple(row["ranks"]): row["algbw_GBps"]
        for row in run.rows
        if row["case"] == "pairs bandwidth" and row["via"] == "mpipar.comm"
    }
    for pair in ((0, 2), (1, 2)):
        assert rates[pair] == pytest.approx(EXPECTED_GBPS, rel=0.05)
    assert rates[0, 1] > 3 * EXPECTED_GBPS
    matrix = done.stdout.split("# pairs bandwidth, mpipar.comm")[1].splitlines()[2:5]
    cells = [line.split()[1:] for line in matrix]
    assert float(cells[0][2]) == pytest.approx(EXPECTED_GBPS, rel=0.05)
    assert float(cells[0][1]) > 3 * EXPECTED_GBPS


def test_hosts_have_clocks_of_their_own(measured):
    done, run = measured
    assert len({place["host"] for place in run.head["places"]}) == 2
    assert "3 ranks on 2 hosts" in done.stderr
    assert "2 clocks: offsets by ping-pong" in done.stderr


def test_start_at_an_instant_works_on_the_estimated_clock(both):
    """One host's clock is AHEAD_SECONDS ahead: only ranks that estimate this begin in time."""
    done, run = both[1]
    assert "2 clocks: offsets by ping-pong" in done.stderr
    assert "good to +-" in done.stderr
    assert len(run.rows) == 2
    for row in run.rows:
        assert row["late"] < len(row["left_ns"])
        assert row["skew_us"] < 2000


def test_a_quick_run_over_a_slow_cable_ends_in_the_time_that_it_says(tmp_path):
    """A window of 64 messages of 1 MiB alone would take a minute here."""
    words = ("--quick", "--seconds", "20")
    try:
        with two_hosts(tmp_path, 10) as hosts:
            done, run = bench(hosts, (1, 1), tmp_path / "quick.jsonl", *words)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces: {error.stderr.strip()}")
    assert run.status == records.COMPLETE
    assert "ends within 20 s" in done.stderr
    spent, said = re.search(r"quick run: (\d+) s of (\d+)", done.stderr).groups()
    assert int(spent) <= int(said) + 3, done.tail(40)
    assert "not measured, for lack of time: " in done.stderr
    named = re.findall(r"^not measured, for lack of time: ([\w+-]+)", done.stderr, re.MULTILINE)
    assert {row["case"].split()[0] for row in run.rows} | set(named) == set(plans.CASES)
    assert run.rows
