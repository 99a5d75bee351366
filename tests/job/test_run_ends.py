"""How `mpipar train` ends where something goes wrong on the way, and how such a run is resumed.

Refusals are in test_cli.py, interrupted runs in test_launch.py. A resumed run ends as one that was
never interrupted, in every byte but for times.
"""

import contextlib
import csv
import errno
import json
import os
import re
import shlex
import shutil
import sys

import pytest
from helpers import REPOSITORY, run_command, run_ranks
from in_process import results_at_once
from program import (
    BLOCK,
    LIMIT,
    PROGRAM,
    block_of,
    environment,
    flip,
    killed_by,
    metrics,
    mpipar,
)
from report_cases import data_of
from short_runs import OFTEN, TINY, assert_same_run, ended, evaluations, prepare, train

from mpipar.run.checkpoint.manifest import committed_steps
from mpipar.run.console import output
from mpipar.run.folder import _make_numbered_folder
from mpipar.run.process import failure, lock

# float16 whose scale overflows at first
FLOAT16 = "--dtype float16 --loss-scale 1048576".split()
SHORT = [*TINY, "--steps", "2"]


def newest_step(folder):
    """The step of the newest checkpoint of a run."""
    return committed_steps(folder / "checkpoints")[-1][0]


# --- kill -9, then go on


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([*TINY], id="float32", marks=pytest.mark.slow),
        pytest.param([*TINY, *FLOAT16], id="float16"),
        pytest.param([*TINY, "--dtype", "bfloat16"], id="bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_been(words, text_folder):
    train(text_folder, *words, "--save-async", "--out", "whole")
    result = ended(text_folder, "kill", 7, *words, "--out", "killed", "--save-interval", "4")
    killed_by(result, 9)
    assert newest_step(text_folder / "killed") == 4
    text = train(text_folder, "--resume", "auto", "--out", "killed")
    assert "resumed after step 4" in text
    assert "took over the lock" in text
    assert "as before" in text
    assert_same_run(text_folder / "whole", text_folder / "killed")
    if words[-1] == "3":
        assert {line["skipped"] for line in metrics(text_folder / "whole")} == {False, True}
    # The run has ended: a further start does nothing. More steps go on from its end.
    text = train(text_folder, "--resume", "auto", "--out", "killed")
    assert "this run ended with step 10" in text


@pytest.mark.slow
def test_two_ranks_killed_twice(text_folder):
    words = [*TINY, *OFTEN, "--pp", "2", "--schedule", "gpipe"]
    train(text_folder, *words, "--out", "whole", ranks=2)
    for at, form in ((5, "--no-save-async"), (9, "--save-async")):
        resume = ["--resume", "auto", form, "--save-interval", "2", "--out", "killed"]
        killed_by(ended(text_folder, "kill", at, *words, *resume, ranks=2), 9)
    assert newest_step(text_folder / "killed") >= 6
    train(text_folder, *words, "--resume", "auto", "--out", "killed", ranks=2)
    assert_same_run(text_folder / "whole", text_folder / "killed")
    assert evaluations(text_folder / "killed") == evaluations(text_folder / "whole")


def steps_and_losses(folder):
    return [
        (row["step"], row["loss_nats"], row["held_out_loss_nats"])
        for row in csv.DictReader((folder / "metrics.csv").open())
    ]


def test_a_stop_saves_and_the_run_goes_on_also_in_its_report(text_folder):
    whole, run = text_folder / "whole", text_folder / "stopped"
    train(text_folder, *TINY, *OFTEN, "--out", "whole")
    result = ended(text_folder, "stop", 7, *TINY, *OFTEN, "--out", "stopped").ended(75)
    step = newest_step(run)
    assert step >= 7
    assert f"stopped on request after step {step}" in result.stdout
    assert f"stopped on request after step {step} of 10" in (run / "report.html").read_text()
    assert len(steps_and_losses(run)) == step
    assert (run / "weights" / "model.safetensors").exists()
    train(text_folder, "--resume", "auto", "--out", "stopped")
    assert_same_run(whole, run)
    assert steps_and_losses(run) == steps_and_losses(whole)
    pages = [data_of((folder / "report.html").read_text()) for folder in (run, whole)]
    assert pages[0]["curves"][:3] == pages[1]["curves"][:3]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder with a whole run in float16, and one that was killed."""
    folder = tmp_path_factory.mktemp("killed")
    prepare(folder)
    train(folder, *TINY, *FLOAT16, "--out", "whole")
    often = "--save-interval 4 --log-interval 1".split()
    ended(folder, "kill", 8, *TINY, *FLOAT16, "--out", "killed", *often)
    assert newest_step(folder / "killed") == 4
    return folder


@pytest.mark.parametrize(
    "twin",
    [
        "nothing",
        "moments",
        "metrics",
        *(
            pytest.param(twin, marks=pytest.mark.slow)
            for twin in ("good", "skipped", "scale", "publish")
        ),
    ],
)
def test_a_run_that_goes_on_with_a_mistake_is_found_out(twin, killed, tmp_path):
    """Broken twins: assert_same_run must see each of them, and nothing else."""
    text_folder = tmp_path / "here"
    shutil.copytree(killed, text_folder)
    ended(text_folder, twin, 0, "--resume", "auto", "--out", "killed").ended()
    with contextlib.nullcontext() if twin == "nothing" else pytest.raises(AssertionError):
        assert_same_run(text_folder / "whole", text_folder / "killed")


# --- damage, and disks that are full


def test_damage_on_one_rank_makes_all_fall_back(text_folder):
    """Only rank 1 reads the damaged file."""
    train(text_folder, *TINY, "--pp", "2", "--save-interval", "5", "--out", "run", ranks=2)
    shutil.copytree(text_folder / "run", text_folder / "whole")
    newest = text_folder / "run" / "checkpoints" / "step-00000010"
    flip(newest / "pieces-00001.safetensors")
    (text_folder / "run" / "result.json").unlink()
    text = train(text_folder, "--resume", "auto", "--out", "run", ranks=2)
    assert "DAMAGED CHECKPOINT, falling back" in text
    assert "pieces-00001.safetensors: is damaged" in text
    assert "resumed after step 5" in text
    assert (newest.parent / "step-00000010.aside-1").is_dir()
    assert_same_run(text_folder / "whole", text_folder / "run")


def test_no_checkpoint_is_whole(text_folder):
    train(text_folder, *TINY, "--save-interval", "5", "--out", "run")
    (text_folder / "run" / "result.json").unlink()
    for _, path in committed_steps(text_folder / "run" / "checkpoints"):
        (path / "manifest.json").write_text("{")
    text = train(text_folder, "--resume", "auto", "--out", "run", code=65)
    assert text.count("manifest.json") == 2
    assert len(metrics(text_folder / "run")) == 10


@pytest.mark.fault
def test_no_space_at_an_interval_is_a_warning(text_folder):
    result = ended(
        text_folder, "no-space", 2, *TINY, "--save-interval", "3", "--out", "run"
    ).ended()
    assert result.stdout.count("WARNING") == 1
    assert "step-00000006: the checkpoint could not be written: rank 0: No space" in result.stdout
    assert [step for step, _ in committed_steps(text_folder / "run" / "checkpoints")] == [9, 10]
    assert len(list((text_folder / "run" / "checkpoints").iterdir())) == 2


@pytest.mark.fault
def test_no_space_at_the_end_keeps_the_former_checkpoint(text_folder):
    result = ended(text_folder, "full", 3, *TINY, "--save-interval", "3", "--out", "run")
    block_of(result, 74, "No space left on device")
    assert [path.name for path in sorted((text_folder / "run" / "checkpoints").iterdir())] == [
        "step-00000003",
        "step-00000006",
    ]
    train(text_folder, "--resume", "auto", "--out", "run")
    assert json.loads((text_folder / "run" / "result.json").read_text())["step"] == 10


# --- run folder


def test_run_folders_are_numbered_and_for_their_user_alone(text_folder):
    (text_folder / "shared").mkdir(mode=0o755)
    for words in ([], ["--out", "runs/mine"], ["--out", "shared"], []):
        train(text_folder, *SHORT, *words)
    folders = [*sorted((text_folder / "runs").iterdir()), text_folder / "shared"]
    assert [(path.name, path.stat().st_mode & 0o777) for path in folders] == [
        ("0001", 0o700),
        ("0002", 0o700),
        ("mine", 0o700),
        ("shared", 0o755),  # it existed
    ]
    assert {path.name for path in text_folder.iterdir()} == {"runs", "shared", "text.txt"}
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
    words = ["train", "--out", "run", *words]
    command = [sys.executable, "-c", FULL_DISK, str(limit), *words]
    return run_ranks(2, command, LIMIT, environment(), text_folder)


@pytest.mark.slow
@pytest.mark.fault
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
    trace, lines = (line for line in result.stderr.splitlines() if "warning" in line)
    assert re.search(r"rank \d cannot write its trace: .*File too large", trace)
    assert "run/metrics.jsonl can't be written: File too large; the run continues" in lines
    folder = text_folder / "run"
    assert (folder / "weights" / "model.safetensors").is_file()
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
    pytest.param("| head -1", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_goes_on_without_standard_output(streams, warned, text_folder):
    """A closed stream's number must not go to the next file that is opened, such as log.txt."""
    words = [*PROGRAM, "train", *SHORT, "--out", "run"]
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
    train(text_folder, *SHORT, "--seq-len", "16", "--out", "run")
    words = ("generate", "run", "--prompt", "caf\u00e9 \u20ac", "--seed", "2")
    result = mpipar(*words, cwd=text_folder, env=locale).ended()
    assert result.stdout.startswith("caf?")
    unread = mpipar("generate", "run", "--prompt", "\udcfc", cwd=text_folder, env=locale)
    block_of(unread, 2, "not valid UTF-8")


# --- a loss that is not finite


@pytest.mark.fault
def test_non_finite_loss_ends_all_ranks(text_folder):
    words = "--steps 50 --out run --lr 1e30 --clip 0 --warmup-steps 0 --optimizer sgd".split()
    result = mpipar("train", *TINY, *words, ranks=4, cwd=text_folder)
    block = block_of(result, 79)
    assert "Warning" not in result.stderr, "NumPy's, with a path of its source"
    assert re.search(r"step \d+: loss \S+, gradient norm \S+: .*--lr \(now 1e\+30\)", block)
    assert not list((text_folder / "run").glob("weights/*.safetensors*")), "they are of no use"
    assert not (text_folder / "run" / lock.NAME).exists()
    steps = [line["step"] for line in metrics(text_folder / "run")]
    assert steps == list(range(1, len(steps) + 1))
    failed = int(re.search(r"step (\d+): loss", block)[1])
    assert failed == len(steps) + 1, "the steps before the failure are in the file"


# --- the time of day


def test_only_what_is_shown_reads_the_time_of_day():
    """A new use needs a look: whether a clock that is set back does any harm."""
    found = {
        str(path.relative_to(REPOSITORY / "mpipar"))
        for path in (REPOSITORY / "mpipar").rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(|datetime\.now\(", path.read_text())
    }
    assert found == {
        "study/report.py",
        "run/console/output.py",
        "run/files/digests.py",
        "interconnect/job.py",
    }  # a file from the future is not remembered
