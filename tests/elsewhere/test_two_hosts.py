"""The benchmark across two hosts whose cable has a known rate, which it has to find."""

import subprocess
import sys
import time

import pytest
from helpers import OVERSUBSCRIBED, REPOSITORY, find_launcher, run_command
from two_hosts import MTU, OVER_TCP, PAYLOAD, missing, two_hosts

from mpipar.interconnect import files
from mpipar.interconnect.arguments import CASES
from mpipar.study.plan.machine import SHEETS

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(missing() is not None, reason=f"network namespaces: {missing()}"),
    pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]"),
]
MBIT_PER_SECOND = 200
EXPECTED_GBPS = MBIT_PER_SECOND / 8e3 * PAYLOAD / MTU


def net(hosts, counts, *words):
    """The finished command, with counts[i] ranks on host i."""
    command = (sys.executable, "-m", "mpipar", "net", *map(str, words))
    environment = {**OVERSUBSCRIBED, **OVER_TCP, "PYTHONPATH": str(REPOSITORY)}
    return run_command(hosts.mpiexec(find_launcher(), counts, *command), 100.0, environment)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    try:
        with two_hosts(tmp_path_factory.mktemp("hosts"), MBIT_PER_SECOND) as found:
            yield found
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces: {error.stderr.strip()}")


def test_the_table_names_the_rate_of_the_cable(hosts, tmp_path):
    words = ("bandwidth", "-b", "1M", "-e", "2M", "-W", 4, "-n", 10, "--json", tmp_path / "rows")
    done = net(hosts, (2, 1), *words)
    assert done.returncode == 0, done.tail()
    (run,) = files.read(str(tmp_path / "rows"))
    assert {row["size_bytes"] for row in run.rows} == {1 << 20, 2 << 20}
    for row in run.rows:
        assert row["link"] == "between nodes"
        assert row["algbw_GBps"] == pytest.approx(EXPECTED_GBPS, rel=0.05)
    assert "3 ranks on 2 hosts" in done.stdout
    assert len({place["host"] for place in run.head["places"]}) == 2


def test_vet_names_the_shaped_link(hosts, tmp_path):
    """The sheet says 1 Gbit/s between hosts, and next to nothing inside them."""
    links = files.LINKS.format(2, 0.02, 1000) + files.LINKS.format(0, 0.125, 1000)
    sheet = tmp_path / "here.toml"
    sheet.write_text((SHEETS / "cpu.toml").read_text().split("\n[[links]]")[0] + links)
    done = net(hosts, (1, 1), "vet", "--machine", sheet)
    assert done.returncode == 1, done.tail()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Slow link: ")]
    assert f"{hosts.names[0]} - {hosts.names[1]} (ranks 0 and 1): transfer 4" in line
    fine = sheet.read_text().replace("gbytes_s = 0.125", "gbytes_s = 0.024")
    sheet.write_text(fine)
    done = net(hosts, (1, 1), "vet", "--machine", sheet)
    assert done.returncode == 0, done.tail()
    assert "Slow" not in done.stdout


def test_a_sheet_has_both_levels(hosts, tmp_path):
    words = ("all-reduce", "-b", "64", "-e", "1M", "-f", 16384, "-n", 10)
    done = net(hosts, (2, 2), *words, "--sheet", tmp_path / "here.toml")
    assert done.returncode == 0, done.tail()
    text = (tmp_path / "here.toml").read_text()
    inside, between = (float(line.split()[-1]) for line in text.splitlines() if "gbytes_s" in line
                       and not line.startswith(("product", "hbm")))  # fmt: skip
    # Each of two ranks of a host has half of the cable, of which sums reach 0.9. A library that
    # sums inside hosts first sends 2/3 of what a ring of four ranks does.
    assert 0.5 * EXPECTED_GBPS < 2 * 0.9 * between < 1.05 * 1.5 * EXPECTED_GBPS
    assert inside > 2 * between


def test_a_quick_run_over_a_slow_cable_ends_within_a_minute(tmp_path):
    """A window of 64 messages of 1 MiB alone would take a minute here."""
    try:
        with two_hosts(tmp_path, 10) as hosts:
            begun = time.monotonic()
            done = net(hosts, (1, 1), "--quick", "--json", tmp_path / "rows")
            spent = time.monotonic() - begun
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces: {error.stderr.strip()}")
    assert done.returncode == 0, done.tail()
    assert spent < 70, done.tail()
    assert "not measured, " in done.stdout
    (run,) = files.read(str(tmp_path / "rows"))
    assert {row["case"] for row in run.rows} == set(CASES)
