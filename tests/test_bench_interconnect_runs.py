"""bench.interconnect as a job: every case, its files, and its failures."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid

import pytest
from helpers import (
    MARK,
    OVERSUBSCRIBED,
    REPOSITORY,
    find_launcher,
    kill_with,
    run_command,
    run_ranks,
    wait_for_end,
)
from in_process import StandIn

from bench.interconnect import __main__ as interconnect
from bench.interconnect import overlap, plans, records, sampling
from bench.interconnect.cases import BARE, COMM, PREPARED
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, UsageError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]"),
]
BENCH = [sys.executable, "-m", "bench.interconnect"]
FAULTY = [sys.executable, "tests/faulty_run.py"]
SHORT = ["--begin-bytes", "64", "--end-bytes", "64", "--seconds", "0.01"]
ENV = {"PYTHONPATH": str(REPOSITORY)}
LIMIT = 150.0


def bench(ranks, *words, program=BENCH):
    return run_ranks(ranks, [*program, *words], LIMIT, env=ENV)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """(finished command, its run) of everything on two ranks."""
    path = tmp_path_factory.mktemp("quick") / "rows.jsonl"
    done = bench(2, "--quick", "--json", str(path))
    assert done.returncode == 0, done.tail()
    (run,) = records.read(str(path))
    return done, run, path


def test_quick_runs_every_case_both_ways_and_checks_it(quick):
    done, run, _ = quick
    assert "parts, ends within 120 s" in done.stderr
    assert run.status == records.COMPLETE
    seen = {row["case"].split()[0] for row in run.rows}
    assert seen == set(plans.CASES)
    assert {row["checked"] for row in run.rows} == {"ok"}
    alone = {"gather": "mpi4py", "scatter": "mpi4py", "noise": "Python"}
    for row in run.rows:
        twin = {
            one["via"]
            for one in run.rows
            if all(one[name] == row[name] for name in ("case", "ranks", "mode", "size_bytes"))
        }
        assert alone.get(row["case"], COMM) in twin, row["case"]
        assert len(twin) >= 2 or row["case"] in alone, row["case"]
        assert row["low_us"] <= row["median_us"] <= row["high_us"]
        assert len(row["entered_ns"]) == row["iterations"]
    assert {row["via"] for row in run.rows if row["case"] == "reduce-scatter"} == {
        COMM,
        BARE,
        "mpi4py Reduce_scatter",
    }
    assert {row["via"] for row in run.rows if row["case"] == "all-to-allv"} == {
        COMM,
        BARE,
        "mpi4py messages",
    }


def test_quick_prints_tables_and_head(quick):
    done, run, _ = quick
    assert "# all-reduce: ranks 0,1" in done.stdout
    assert "busbw_GB/s" in done.stdout
    assert "# contention" in done.stdout
    assert "barrier before each iteration" in done.stderr
    assert "bound of busbw: " in done.stderr
    for row in run.rows:
        assert ("bound" in row) == (row["case"] not in ("barrier", "noise")), row["case"]
    assert {"machine", "library", "places", "environment", "revision"} <= run.head.keys()


@pytest.mark.parametrize("kind", ["csv", "markdown", "text"])
def test_tables_are_made_again_from_the_file(quick, kind):
    path = quick[2]
    done = run_command([sys.executable, "-m", "bench.table", path, "--format", kind], LIMIT, ENV)
    assert done.returncode == 0, done.tail()
    assert done.stdout.count("all-reduce") >= 1


def test_pictures_of_every_kind(quick, tmp_path):
    some = [row for row in quick[1].rows if row["case"] in ("ring", "pairs latency", "noise")]
    writer = records.Writer(str(tmp_path / "some.jsonl"))
    writer.head(quick[1].head)
    for row in some:
        writer.row(row)
    writer.end(records.COMPLETE)
    done = run_command(
        [sys.executable, "-m", "bench.plot", tmp_path / "some.jsonl", "--out", tmp_path / "plots"],
        LIMIT,
        ENV,
    )
    assert done.returncode == 0, done.tail()
    drawn = (tmp_path / "plots" / "ring-world-ranks-0-1-mpi-host-rotated-time.svg").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("64 B", "4.0 KiB"))
    page = (tmp_path / "plots" / "index.html").read_text()
    names = sorted(path.name for path in (tmp_path / "plots").iterdir() if path.suffix != ".html")
    assert sorted(re.findall(r'<img src="([^"]+)"', page)) == [
        name for name in names if name.endswith(".svg")
    ]
    assert names == [
        f"{stem}.{kind}"
        for stem in (
            "noise-world-ranks-0-1-mpi-host-rotated-none-detours",
            "pairs-latency-mpi-host-rotated",
            "ring-world-ranks-0-1-mpi-host-rotated-bandwidth",
            "ring-world-ranks-0-1-mpi-host-rotated-late",
            "ring-world-ranks-0-1-mpi-host-rotated-samples",
            "ring-world-ranks-0-1-mpi-host-rotated-time",
        )
        for kind in ("png", "svg")
    ]
    assert all((tmp_path / "plots" / name).stat().st_size > 2000 for name in names)


def test_layout_on_four_ranks(tmp_path):
    path = tmp_path / "rows.jsonl"
    done = bench(
        4,
        "all-reduce",
        "stage-chain",
        "--layout",
        "pp=2,tp=2",
        "--bound-GBps",
        "2.5",
        *SHORT,
        "--json",
        str(path),
    )
    assert done.returncode == 0, done.tail()
    rows = [row for row in records.rows_of([str(path)]) if row["via"] == COMM]
    groups = {
        (row["axis"], row["mode"], tuple(row["ranks"]))
        for row in rows
        if row["case"] == "all-reduce"
    }
    assert groups == {
        (axis, mode, ranks)
        for axis, both in (("pp", ((0, 2), (1, 3))), ("tp", ((0, 1), (2, 3))))
        for mode in ("alone", "together")
        for ranks in both
    }
    assert {row["case"] for row in rows if row["axis"] == "pp"} == {
        "all-reduce",
        "stage-chain 1f1b",
        "stage-chain interleaved",
    }
    assert "more ranks than cores" in done.stderr or len(os.sched_getaffinity(0)) >= 4
    assert "# contention: together over alone" in done.stdout
    assert {(row["bound"], row["bound_GBps"]) for row in rows} == {("--bound-GBps", 2.5)}
    assert "bound of busbw: 2.5 GB/s (--bound-GBps) inside a host" in done.stderr


def test_wrong_payload_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    done = bench(2, "wrong", "all-reduce", *SHORT, "--json", str(path), program=FAULTY)
    assert done.returncode == EXIT_CHECK_FAILED, done.tail()
    assert (
        "refused: all-reduce, 64 bytes, mpipar.comm: rank 1: 1 of 16 elements are wrong"
        in done.stderr
    )
    assert {row["via"] for row in records.rows_of([str(path)])} == {BARE, PREPARED}


def test_unchecked_is_said(tmp_path):
    done = bench(2, "wrong", "all-reduce", *SHORT, "--no-check", program=FAULTY)
    assert done.returncode == 0, done.tail()
    assert done.stdout.count("unchecked") == 3


def test_stall_ends_with_a_message():
    # Buffers as large as caches take seconds to make on a busy machine: a stall, too.
    done = bench(
        2,
        "stall",
        "all-reduce",
        *SHORT,
        "--stall-seconds",
        "2",
        "--footprint",
        "1M",
        program=FAULTY,
    )
    assert done.returncode not in (0, None)
    assert "no progress for 2 s" in done.stderr
    assert re.search(r"rank 1 is at .* \(all-reduce, 64 bytes, mpipar\.comm", done.stderr)


def test_straggler_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    done = bench(2, "straggler", "all-reduce", *SHORT, "--json", str(path), program=FAULTY)
    assert done.returncode == 0, done.tail()
    (slow,) = [row for row in records.rows_of([str(path)]) if row["via"] == COMM]
    assert slow["slowest_rank"] == 1
    assert slow["slowest_share"] > 0.5  # others lose their core at times
    assert slow["median_us"] > 300


def test_ctrl_c_leaves_a_valid_file(tmp_path):
    path, mark = tmp_path / "rows.jsonl", uuid.uuid4().hex
    command = [find_launcher(), "-n", "2", *BENCH, "all", "--seconds", "0.1", "--json", str(path)]
    with open(tmp_path / "out", "w") as out:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, **OVERSUBSCRIBED, **ENV, MARK: mark},
        )
        try:
            deadline = time.monotonic() + LIMIT
            while not path.exists() or path.read_text().count("\n") < 3:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            code = process.wait(LIMIT)
            assert wait_for_end(mark) == []
        finally:
            kill_with(MARK, mark)
            process.wait()
    assert code == EXIT_INTERRUPTED, (tmp_path / "out").read_text()
    (run,) = records.read(str(path))
    assert run.status == records.INTERRUPTED
    assert run.rows
    assert all(json.dumps(row) for row in run.rows)


@pytest.mark.parametrize(
    ("sync", "title"),
    [pytest.param("deadline", "deadline start", marks=pytest.mark.alone), ("none", "back to back")],
)
def test_start_of_iterations_is_said_in_table_and_file(sync, title, tmp_path):
    path = tmp_path / "rows.jsonl"
    done = bench(2, "broadcast", *SHORT, "--sync", sync, "--json", str(path))
    assert done.returncode == 0, done.tail()
    assert f"{title}; low, high: within this launch\n" in done.stdout
    (run,) = records.read(str(path))
    assert sampling.MEANING[sync] == run.head["start"]
    for row in run.rows:
        assert row["sync"] == sync
        assert row["late"] == len(row["late_at"])
        assert row["iterations"] + row["late"] == len(row["left_ns"])


def test_overlap_is_measured_and_printed(tmp_path):
    path = tmp_path / "rows.jsonl"
    done = bench(2, "ring", "iall-reduce", *SHORT, "--overlap", "4", "--json", str(path))
    assert done.returncode == 0, done.tail()
    assert "# ring overlapped K=4: ranks 0,1" in done.stdout
    rows = records.rows_of([str(path)])
    assert len(rows) == 2 * 5
    both = [row for row in rows if row["via"].endswith("+ computing")]
    assert len(both) == 4
    for row in both:
        percent = row["overlap_percent"]
        assert percent == overlap.percent(row["alone_us"], row["computing_us"], row["median_us"])
        # the table has more digits: 93.6 is neither 93 nor 94
        assert f" {percent:.0f}" in done.stdout or f" {int(percent)}." in done.stdout


def test_launches_are_fresh_jobs_in_one_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    start = f"{find_launcher()} -n 2"
    done = run_command(
        [*BENCH, "barrier", *SHORT, "--launches", "2", "--start", start, "--json", path],
        LIMIT,
        {**OVERSUBSCRIBED, **ENV},
    )
    assert done.returncode == 0, done.tail()
    runs = records.read(str(path))
    assert [run.head["launch"] for run in runs] == [1, 2]
    assert "# barrier: " in done.stdout
    assert "2 launches; low, high: another launch's median, 95 %" in done.stdout
    assert done.stderr.count("huge pages: ") == 1  # the head of the first launch alone


@pytest.mark.parametrize("name", ["interconnect", "calibrate", "matmul", "step"])
def test_help_under_a_launcher_is_printed_once(name):
    done = bench(2, "--help", program=[sys.executable, "-m", f"bench.{name}"])
    assert (done.returncode, done.stderr) == (0, ""), done.tail()
    assert done.stdout.count("usage: ") == 1


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        (1, "latency", "at least 2 ranks"),
        (2, "latncy", "did you mean"),
        (2, "", "name the cases"),
        (2, "ring --layout dp=4", "for 4 ranks"),
        (2, "latency --layout dp=2", "no groups"),
        (2, "ring --begin-bytes 3x", "be bytes"),
        (2, "ring --factor 1", "--factor 1.01 or more"),
        (2, "ring --factor nan", "by a factor of nan"),
        (2, "ring --factor inf", "by a factor of inf"),
        (2, "ring --launches 2 --json x", "--launches"),
        (2, "ring --seconds 0", "above 0"),
        (2, "ring --window x", "--window"),
        (2, "ring --seconds nan", "above 0"),
        (1, "ring --launches 0", "at least 1"),
        (2, "ring --stall-seconds -1", "--stall-seconds"),
        (2, "ring --start mpirun", "starts jobs only where nothing else does"),
        (2, "ring --ways C,mpi", "did you mean"),
        (2, "ring --ways C --sync deadline", "--ways C: its"),
        (2, "noise --ways C --warm-up -1", "--warm-up must"),
        (2, "ring --begin-bytes -1", "be bytes"),
        (2, "ring --iterations 1000000", "from 0 to 100000"),
        (2, "noise --layout dp=2", "no groups"),
        (2, "ring --quick --factor=3", "out --factor"),
        (2, "ring --wind 3", "--wind 3"),
        (2, "ring all-reduce --overlap 2", "all-reduce is not posted"),
        (2, "stage-chain --overlap 2 --layout pp=2", "only ring, iall-reduce, fan-in, fan-out are"),
        (2, "ring --overlap -1", "0 or more"),
        (2, "all-to-allv --routing zip", "no routing 'zip'; did you mean zipf?"),
        (2, "ring --routing zipf", "belongs to all-to-allv, which is not run"),
        *(
            (2, f"ring --bound-GBps={wrong}", "--bound-GBps must be above 0")
            for wrong in ("0", "-1", "nan", "inf")
        ),
    ],
)
def test_bad_input_is_refused(ranks, words, message, monkeypatch):
    with pytest.raises(UsageError) as caught:
        interconnect.main(words.split(), StandIn(ranks))
    assert str(caught.value).count(message) == 1


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        (2, "latncy", "did you mean"),
        (2, "ring --begin-bytes 9000G --end-bytes 9000G", "smaller --end-bytes"),
        (2, "ring --transport staged", "--transport staged needs "),  # CuPy, or a GPU for it
        (1, "ring --launches 1 --start /no-such --json /tmp/x.jsonl", "/no-such: No such file"),
    ],
)
def test_bad_input_is_explained(ranks, words, message):
    done = bench(ranks, *words.split())
    assert done.returncode in (EXIT_USAGE, 69), done.tail()
    assert done.stderr.count(message) == 1, done.tail()
    assert "Traceback" not in done.stderr
