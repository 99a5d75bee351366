"""mpipar net as a job: every case, its files, several launches, and its failures."""

import signal
import sys
import time

import pytest
from helpers import OVERSUBSCRIBED, REPOSITORY, find_launcher, run_command, run_ranks
from program import running

from mpipar.errors import EXIT_CHECK_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from mpipar.interconnect import files
from mpipar.interconnect.arguments import BY, CASES
from mpipar.interconnect.cases import BARE, COMM
from mpipar.study.plan.machine import load_machine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]"),
]
NET = [sys.executable, "-m", "mpipar", "net"]
FAULTY = [sys.executable, "tests/helpers/faulty_run.py"]
SHORT = ["-b", "64", "-e", "64", "-n", "10"]
ENV = {"PYTHONPATH": str(REPOSITORY)}
LIMIT = 150.0


def net(ranks, *words, program=NET):
    return run_ranks(ranks, [*program, *map(str, words)], LIMIT, env=ENV)


def test_quick_runs_every_case_both_ways_on_one_screen(tmp_path):
    path, page = tmp_path / "rows.jsonl", tmp_path / "page.html"
    begun = time.monotonic()
    done = net(2, "--quick", "--json", path, "--html", page)
    assert done.returncode == 0, done.tail()
    assert time.monotonic() - begun < 60
    lines = done.stdout.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[-6:]] == (
        "hosts MPI latency bandwidth all-reduce verdict".split()
    )
    (run,) = files.read(str(path))
    assert {(row["case"], row["via"]) for row in run.rows} == {
        (case, via) for case in CASES for via in (COMM, BARE)
    }
    for row in run.rows:
        assert row["checked"] == "ok"
        assert row["low_us"] <= row["median_us"] <= row["high_us"]
        assert len(row["times_us"]) == row["iterations"]
    html = page.read_text()
    assert html.count("<svg") == 2 * len(CASES)
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert {"arguments", "environment", "places", "library"} <= run.head.keys()


def test_groups_of_a_layout_and_a_sheet(tmp_path):
    done = net(4, "all-reduce", "ring", *SHORT, "--layout", "dp=2,tp=2", "--csv", tmp_path / "csv")
    assert done.returncode == 0, done.tail()
    assert "all dp groups, the slowest" in done.stdout
    assert (tmp_path / "csv").read_text().count("\n") == 1 + 2 * 2 * (2 * 1 + 2 * 2)
    sheet = tmp_path / "here.toml"
    done = net(2, "all-reduce", *SHORT, "--sheet", sheet)
    assert done.returncode == 0, done.tail()
    assert load_machine(str(sheet)).links[0].joins == 2


def test_launches_give_one_table_and_two_results_compare(tmp_path):
    path = tmp_path / "rows.jsonl"
    words = ["all-reduce", *SHORT, "--via", "comm,algorithms", "--launches", "2"]
    environment = {**OVERSUBSCRIBED, **ENV}
    done = run_command([*NET, *words, "--json", str(path)], LIMIT, environment)
    assert done.returncode == 0, done.tail()
    assert "2 launches" in done.stdout
    runs = files.read(str(path))
    assert [run.head["launch"] for run in runs] == [1, 2]
    assert {row["via"] for run in runs for row in run.rows} == {COMM, *BY}
    same = run_command([*NET, "compare", str(path), str(path)], LIMIT, ENV)
    assert same.returncode == 0, same.tail()
    old = [sys.executable, "-m", "bench", "compare", str(path), str(path), "--check"]
    found = run_command(old, LIMIT, ENV)
    assert found.returncode == 0, found.tail()
    assert found.stdout == same.stdout
    assert "mpipar net compare" in found.stderr


def test_the_old_name_says_the_new_one():
    words = ["latency", "--begin-bytes", "64", "--end-bytes", "64", "-n", "5", "--via", "mpi4py"]
    done = net(2, *words, program=[sys.executable, "-m", "bench", "interconnect"])
    assert done.returncode == 0, done.tail()
    assert "is now: mpipar net" in done.stderr
    assert "mpi4py" in done.stdout


def test_a_wrong_payload_is_refused():
    done = net(2, "all-reduce", "ring", *SHORT, program=[*FAULTY, "wrong"])
    assert done.returncode == EXIT_CHECK_FAILED, done.tail()
    assert "refused: all-reduce, 64 bytes, mpipar.comm: rank 1: 1 elements are wrong" in done.stdout
    assert "verdict     1 wrong payloads" in done.stdout
    assert "# ring" in done.stdout


def test_a_stall_ends_the_job():
    done = net(2, "all-reduce", *SHORT, "--hang-stop", "2", program=[*FAULTY, "stall"])
    assert done.returncode not in (0, EXIT_CHECK_FAILED), done.tail()
    assert "no progress for 2 s" in done.stderr
    assert "all-reduce, 64 bytes" in done.stderr


@pytest.mark.parametrize(
    ("ranks", "words", "text"),
    [
        (1, ["latency"], "at least 2 ranks"),
        (2, ["latency", "-e", "512G"], "give a smaller -e"),
        (2, ["latency", "--launches", "2"], "run it without"),
        (2, ["ring", "--layout", "dp=8"], "is for 8 ranks, not 2"),
    ],
)
def test_what_cannot_run_is_refused_in_words(ranks, words, text):
    done = net(ranks, *words)
    assert done.returncode == EXIT_USAGE, done.tail()
    assert text in done.stderr


def test_vet_needs_three_ranks():
    done = net(2, "vet")
    assert done.returncode != 0
    assert "too few to compare: 2 of at least 3 ranks" in done.stderr


def test_a_signal_leaves_whole_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    with running([*NET, "-b", 64, "-e", 64, "-n", 100, "--json", path], tmp_path, 2) as job:
        job.wait_until(lambda: path.exists() and '"row"' in path.read_text())
        assert job.interrupt() in (EXIT_INTERRUPTED, -signal.SIGINT, 128 + signal.SIGINT)
    assert files.read(str(path))[0].rows
