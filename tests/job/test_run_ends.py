"""The end of `mpipar train` when something goes wrong on the way, and the place of its files.

Refusals are in test_cli.py, interrupted runs in test_ctrl_c.py.
"""

import contextlib
import errno
import json
import os
import re
import shlex
import sys

import pytest
from fault_table import fault
from helpers import REPOSITORY, run_command, run_ranks
from in_process import alone, printed, results_at_once
from program import BLOCK, LIMIT, PROGRAM, TEXT, block_of, environment, metrics, mpipar

from mpipar.run.console import output
from mpipar.run.folder import _make_numbered_folder
from mpipar.run.process import failure, lock

TINY = """--layers 2 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --num-microbatches 2
    --sample-tokens 4""".split()
SHORT = [*TINY, "--steps", "2"]


def train(text_folder, *words, **options):
    return mpipar("train", "--data", "text.txt", *words, **options, cwd=text_folder)


def train_here(text_folder, *words):
    """Train on one rank in this process."""
    alone("train", "--data", "text.txt", *SHORT, *words, cwd=text_folder).ended()


# --- run folder


def test_a_run_folder_is_for_its_user_alone(text_folder):
    (text_folder / "shared").mkdir(mode=0o755)
    for out in ("a/b", "shared"):
        train_here(text_folder, "--out", out)
    train_here(text_folder)
    modes = [(text_folder / out).stat().st_mode & 0o777 for out in ("a/b", "runs/0001", "shared")]
    assert modes == [0o700, 0o700, 0o755], "an existing folder stays as it is"


def test_run_folders_are_numbered_and_named(text_folder):
    for words in ([], [], ["--out", "runs/mine"], []):
        train_here(text_folder, *words)
    names = sorted(path.name for path in (text_folder / "runs").iterdir())
    assert names == ["0001", "0002", "0003", "mine"]
    assert {path.name for path in text_folder.iterdir()} == {"runs", "text.txt"}
    with contextlib.chdir(text_folder):
        made = results_at_once(lambda: _make_numbered_folder().name)
    assert len(set(made)) == 8, "runs that start at once get folders of their own"


FULL_DISK = """
import resource, sys
from mpipar import cli
from mpipar.run.process import session as launch
plain = launch.Session.start
def start(self):
    world = plain(self)  # MPI makes files too, in shared memory
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
    return world
launch.Session.start = start
launch.guard(cli.main, sys.argv[2:])
"""


def on_a_disk_of(limit, text_folder, *words):
    words = ["train", "--data", "text.txt", "--out", "run", *words]
    command = [sys.executable, "-c", FULL_DISK, str(limit), *words]
    return run_ranks(2, command, LIMIT, environment(), text_folder)


@pytest.mark.slow
@fault(22, "no space at the start, or for the weights", 74)
@pytest.mark.parametrize("limit", [500, 1000, 8000], ids=["config", "log", "weights"])
def test_full_disk_is_said_with_code_74(limit, text_folder):
    """A limit on the size of files stands for the disk."""
    block = block_of(on_a_disk_of(limit, text_folder, *SHORT), 74, "File too large", "run")
    assert "Traceback" not in block
    assert not list((text_folder / "run").glob("weights/*.safetensors*"))


@pytest.mark.slow
def test_a_disk_that_is_too_small_for_trace_and_metrics_does_not_end_the_run(text_folder):
    """The weights fit, and they are what the run is for."""
    words = [*TINY, "--tp", "2", "--steps", "100", "--trace", "1:30"]
    result = on_a_disk_of(40000, text_folder, *words).ended()
    warnings = [line for line in result.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 2
    assert re.search(r"rank \d cannot write its trace: .*File too large", warnings[0])
    assert "run/metrics.jsonl can't be written: File too large; the run continues" in warnings[1]
    folder = text_folder / "run"
    assert (folder / "weights" / "model.safetensors").is_file()
    assert not {"trace", "report.html"} & {path.name for path in folder.iterdir()}
    assert not list(folder.rglob("*.partial"))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines[:-1]]
    assert steps == list(range(1, len(lines)))
    assert "held-out loss" in result.stdout


def test_a_growing_file_has_in_the_end_all_that_the_disk_refused_for_a_while(tmp_path, capsys):
    class Disk:
        """Takes three bytes at a time, and nothing while it is full."""

        full, content = False, b""

        def write(self, data):
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.content += data[:3]
            return min(3, len(data))

        def close(self):
            pass

    file = output.GrowingFile(tmp_path, "log.txt")
    file.file.close()
    file.file = disk = Disk()
    file.write("one line\n")
    disk.full = True
    for text in ("another \u20ac\n", "a third\n"):
        file.write(text)
    assert disk.content == b"one line\n"
    assert capsys.readouterr().err.count("log.txt can't be written: No space left") == 1
    disk.full = False
    file.close()
    assert disk.content.decode() == "one line\nanother \u20ac\na third\n"


PART_OF_A_FILE = """
import resource, sys
from pathlib import Path
from mpipar import errors
from mpipar.run.process import failure
from mpipar.run.console import output
folder, said = Path(sys.argv[1]), []
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
try:
    output.write_text(folder / "report.html", "<html>" * 10)
except errors.OutputError as error:
    said.append(str(error))
report = failure.error_report(ValueError("no"), "")
said.append(failure.write_record(folder, 0, report))
resource.setrlimit(resource.RLIMIT_FSIZE, before)
print(said)
"""


def test_a_file_that_did_not_fit_is_not_left_as_a_part(tmp_path):
    """It runs in a separate process: the limit would also hold for files that the tests write."""
    done = run_command([sys.executable, "-c", PART_OF_A_FILE, str(tmp_path)], LIMIT, environment())
    assert done.returncode == 0, done.tail()
    assert "report.html: File too large" in done.stdout
    assert done.stdout.endswith(", None]\n")
    assert [path.name for path in tmp_path.rglob("*")] == ["errors"]


def test_of_ranks_that_fail_at_the_same_moment_one_is_first():
    """Processes stand for ranks; each keeps its claim until it ends."""
    token = os.urandom(8).hex()
    said = results_at_once(lambda: failure.is_first(token))
    assert sum(said) == 1
    assert failure.is_first(token), "its owner has ended"
    assert not failure.is_first(token), "a rank fails once"


# --- standard output that nobody gets


@pytest.mark.parametrize(("streams", "warned"), [
    ("<&- >&- 2>&-", False), (">/dev/full", True),
    pytest.param(">&-", False, marks=pytest.mark.slow),
    pytest.param(">/dev/full 2>/dev/full", False, marks=pytest.mark.slow),
    pytest.param("2>&-", False, marks=pytest.mark.slow),
    pytest.param("| head -1", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_goes_on_without_standard_output(streams, warned, text_folder):
    """A closed stream's number must not go to the next file that is opened, such as log.txt."""
    words = [*PROGRAM, "train", "--data", "text.txt", *SHORT, "--out", "run"]
    result = run_command(
        ["bash", "-c", f"set -o pipefail; {shlex.join(words)} {streams}"],
        LIMIT,
        environment(),
        text_folder,
    ).ended()
    assert ("standard output can't be written" in result.stderr) == warned, result.tail()
    assert BLOCK not in result.stderr
    log = (text_folder / "run" / "log.txt").read_text()
    assert log.startswith("1 rank on 1 host")
    assert "weights, checkpoints" in log.splitlines()[-1]
    assert metrics(text_folder / "run")[-1]["step"] == 2


# --- text that the console can't show


def test_console_of_another_encoding(text_folder):
    """The console shows what it can."""
    locale = {
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "PYTHONIOENCODING": "ascii",
    }
    train_here(text_folder, "--seq-len", "16", "--out", "run")
    words = ("generate", "run", "--prompt", "caf\u00e9 \u20ac", "--seed", "2")
    result = mpipar(*words, cwd=text_folder, env=locale).ended()
    assert result.stdout.startswith("caf?")
    unread = mpipar("generate", "run", "--prompt", "\udcfc", cwd=text_folder, env=locale)
    block_of(unread, 2, "not valid UTF-8")


# --- a loss that is not finite


@fault(32, "a loss that is not finite", 79)
def test_non_finite_loss_ends_all_ranks(text_folder):
    words = "--steps 50 --out run --lr 1e30 --clip 0 --warmup-steps 0 --optimizer sgd".split()
    result = train(text_folder, *TINY, *words, ranks=4)
    block = block_of(result, 79)
    assert "Warning" not in result.stderr, "NumPy's, with a path of its source"
    assert re.search(r"step \d+: loss \S+, gradient norm \S+: .*--lr \(now 1e\+30\)", block)
    assert not list((text_folder / "run").glob("weights/*.safetensors*")), "they are of no use"
    assert not (text_folder / "run" / lock.NAME).exists()
    steps = [line["step"] for line in metrics(text_folder / "run")]
    assert steps == list(range(1, len(steps) + 1))
    failed = int(re.search(r"step (\d+): loss", block)[1])
    assert failed == len(steps) + 1, "the steps before the failure are in the file"


# --- the time of day is set back during a run: nothing is measured or decided by it


SET_BACK = """
import datetime, os, time
from mpipar.train.worker import Worker
plain_time, plain_step, days = time.time, Worker.train_step, [0]
time.time = lambda: plain_time() - 86400 * days[0]
time.time_ns = lambda: int(time.time() * 1e9)
def step(self, number, *rest):
    days[0] = max(0, number - 2)  # from step 3 on, a day for each step
    return plain_step(self, number, *rest)
Worker.train_step = step
from mpipar.__main__ import main
main()
"""
SMALL = (
    "--layers 1 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --num-microbatches 1"
    " --sample-tokens 0 --log-interval 1 --save-interval 2"
).split()


def test_a_run_goes_on_and_is_resumed_when_the_clock_is_set_back(tmp_path):
    words = ["train", *SMALL, *TEXT, "--out", str(tmp_path / "run"), "--resume", "auto", "--steps"]
    result = run_command([sys.executable, "-c", SET_BACK, *words, "5"], LIMIT, environment())
    assert result.returncode == 0, result.tail()
    assert not re.search(r"eta -|-\d+ ms|took -|-\d\.\d+ s", result.stdout), result.tail()
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(0 < line["step_seconds"] < LIMIT for line in lines)
    assert not re.search(r" -\d", printed("ckpt", "ls", tmp_path / "run")), "an age"
    alone(*words, "6").ended()
    assert metrics(tmp_path / "run")[-1]["step"] == 6


def test_only_what_is_shown_reads_the_time_of_day():
    """A new use needs a look: whether a clock that is set back does any harm."""
    found = {
        str(path.relative_to(REPOSITORY / "mpipar"))
        for path in (REPOSITORY / "mpipar").rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(|datetime\.now\(", path.read_text())
    }
    assert found == {
        "study/report.py",
        "run/console/tensorboard.py",
        "run/files/digests.py",
        "interconnect/job.py",
    }  # a file from the future is not remembered
