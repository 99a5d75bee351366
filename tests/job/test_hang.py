"""A stuck rank is named and a wrong or missing collective is reported: no hang is silent."""

import re
import time

import pytest
from helpers import REPOSITORY, run_ranks
from program import FAULTY, TEXT, mpipar

from mpipar.comm.recorder import Recorder
from mpipar.run.process import watchdog
from mpipar.run.process.watchdog import Watchdog

SHORT = ["--hang-warn", "0", "--hang-stop", "1"]
SMALL = (
    "--layers 2 --d-model 16 --heads 2 --seq-len 8 --batch-size 4 --num-microbatches 1"
    " --steps 5 --sample-tokens 0 --log-interval 1"
).split()
QUICK = ["--hang-warn", "1", "--hang-stop", "2"]


def faulty(how, *arguments, tmp_path, ranks=2):
    text = TEXT if how != "none" else ()  # a healthy run has a long evaluation
    command = [*FAULTY, how, "train", *SMALL, *text, "--out", str(tmp_path / "run"), *arguments]
    return run_ranks(ranks, command, timeout=150, env={"PYTHONPATH": str(REPOSITORY)})


@pytest.mark.parametrize(
    ("how", "more"),
    [
        ("sleep", ()),
        pytest.param("sleep", ("--all-reduce", "window"), marks=pytest.mark.slow),
        pytest.param("spin", (), marks=[pytest.mark.slow, pytest.mark.fault]),
    ],
)
def test_a_stuck_rank_is_named_with_what_it_does(how, more, tmp_path):
    result = faulty(how, *QUICK, *more, "--layout", "tp=2", tmp_path=tmp_path)
    text = result.stderr
    assert result.returncode == 76, result.tail()
    assert "no progress for 1 s" in text  # the warning came first
    assert re.search(
        r"barrier block1\.\S+ \(all_reduce \d+ of the tp group \[0, 1\]\) is"
        r" incomplete:"
        r" rank 0 arrived, rank 1 missing",
        text,
    ), result.tail()
    assert re.search(
        r"late: rank 1 is in no communication \(step \d, phase F, stage 0, mb 0\)", text
    )
    assert "faulty_run.py" in text  # the line on which rank 1 is
    assert text.count("mpipar: stopped") == 1


@pytest.mark.slow
def test_a_stuck_stage_is_named_by_the_one_that_waits_for_its_message(tmp_path):
    result = faulty("sleep", *QUICK, "--layout", "pp=2", "--stage-layers", "1,1", tmp_path=tmp_path)
    assert result.returncode == 76, result.tail()
    assert re.search(r"rank 0 waits in recv gradients from rank 1 \(pp, step", result.stderr)
    assert "late: rank 1 is in no communication" in result.stderr


@pytest.mark.fault
@pytest.mark.parametrize(
    "sums",
    [  # pytest-mpi would skip a test with the word `mpi`
        pytest.param("mpi", id="library"),
        pytest.param("window", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_process_is_missing(sums, tmp_path):
    result = faulty("stopped", *QUICK, "--layout", "tp=2", "--all-reduce", sums, tmp_path=tmp_path)
    assert result.returncode == 76, result.tail()
    assert "late: rank 1 has written nothing" in result.stderr


MISSING = r"rank 1 has written nothing"
WAITS = r"rank 0 is at mpipar/run/\w+\.py:\d+ in \w+"  # not where a gather is made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("MPI_Init", WAITS + ".*OMPI_MCA_\\*\\) the same on all ranks\\?"),
        ("prompt", WAITS),  # there is no run folder yet
        ("setup", MISSING),
        ("evaluation", MISSING),
        ("MPI_Finalize", MISSING),
    ],
)
def test_a_process_that_stops_beside_the_steps_is_missing(place, said, tmp_path):
    result = faulty(f"{place}/stop/1", *SHORT, "--layout", "tp=2", tmp_path=tmp_path).ended(76)
    assert re.search(said, result.stderr), result.tail()
    assert result.stderr.count("mpipar: stopped") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "place"), [("generate", "generation"), ("verify", "gradients")]
)
def test_a_process_that_stops_ends_another_command(command, place, tmp_path):
    words = ["verify", *"--layers 2 --d-model 16 --heads 2 --seq-len 8 --batch-size 4".split()]
    if command == "generate":
        mpipar("train", *SMALL, "--out", tmp_path / "run").ended()
        words = ["generate", str(tmp_path / "run"), "--prompt", "a"]
    words = [*FAULTY, f"{place}/stop/1", *words, "--layout", "tp=2", *SHORT]
    result = run_ranks(2, words, 150, {"PYTHONPATH": str(REPOSITORY)}).ended(76)
    assert re.search(r"rank 0 (waits in \w+|is at) .*\.py:\d+", result.stderr), result.tail()
    assert result.stderr.count("mpipar: stopped") == 1


class Pauses:
    """Stands for the event that ends a watchdog: so many pauses, each of which takes an hour."""

    def __init__(self, number, monkeypatch):
        self.left, self.now = number, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def wait(self, seconds):
        self.now += 3600
        self.left -= 1
        return self.left < 0


@pytest.mark.fault
@pytest.mark.parametrize(("number", "reports"), [(10, 0), (70, 1)])
def test_a_suspended_job_was_not_stuck(number, reports, monkeypatch):
    """Both stop all threads while the clock continues; only pauses in which it ran count."""
    said = []
    made = Watchdog(0, str, said.append)
    made._ended = Pauses(number, monkeypatch)
    made.warn, made.stop = 0, 60
    with made.following(lambda: 0, watchdog.state_of):
        made._watch()
    assert bool(said) == bool(reports)


def test_a_rank_that_wrote_nothing_is_named_also_where_nobody_waits_in_a_barrier():
    """An example is the collection of all ranks' metrics, which no record has."""
    waits = {"says": "is at a.py:1", "barrier": "", "for": [], "stack": ["a.py:1"]}
    lines = watchdog.explain({0: waits}, range(2))
    assert len(lines) == 2
    assert lines[1].startswith("rank 1 has written nothing")


def test_a_full_ring_of_spans_shows_progress_all_the_same():
    recorder = Recorder(capacity=2)
    markers = []
    for _ in range(4):
        recorder.span("F", 0, 0, 0)
        markers.append(watchdog.marker(recorder))
    assert len(set(markers)) == 4


def test_a_state_that_is_no_longer_true_is_gone_at_the_end(tmp_path):
    made = Watchdog(0, str, pytest.fail)
    made.folder = tmp_path
    with made.following(lambda: 0, watchdog.state_of):
        made.warn, made.stop = 0.05, 0.0
        made.start()
        deadline = time.monotonic() + 60
        while not (tmp_path / "hang" / "rank-00000.json").exists():
            assert time.monotonic() < deadline, "no state was written"
            time.sleep(0.01)
        made.end()
    assert not (tmp_path / "hang").exists()


@pytest.mark.parametrize(
    ("how", "second"),
    [
        ("missing", r"all_reduce block1\.ffn\.down"),
        pytest.param("mismatch", r"all_gather block1\.attn\.proj", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_collective_ends_with_the_two_places(how, second, tmp_path):
    result = faulty(how, *QUICK, "--layout", "tp=2", "--check-comm", tmp_path=tmp_path).ended(76)
    assert re.search(
        r"rank 0 calls all_reduce block1\.attn\.proj float32 \d+ bytes at"
        r" mpipar/layers/attention\.py:\d+, cut mpipar/layers/parallel/row\.py:\d+",
        result.stderr,
    ), result.tail()
    assert re.search(f"rank 1 calls {second}", result.stderr), result.tail()
    assert result.stderr.count("mpipar: stopped") == 1


@pytest.mark.slow
def test_a_report_that_is_drawn_for_long_is_no_hang(tmp_path):
    faulty("slow-report", *SHORT, *TEXT, "--layout", "tp=2", tmp_path=tmp_path).ended()
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
def test_a_healthy_run_reports_nothing(tmp_path):
    limits = ["--hang-warn", "3", "--hang-stop", "30"]  # a disk may need two seconds for a file
    result = faulty(
        "none",
        *limits,
        "--eval-tokens",
        "20000",
        "--layout",
        "tp=2",
        "--check-comm",
        tmp_path=tmp_path,
    ).ended()
    assert "no progress" not in result.stderr
    assert not (tmp_path / "run" / "hang").exists()
