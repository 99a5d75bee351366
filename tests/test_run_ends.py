"""How `mpipar train` ends when something is wrong, and where its files go.

Interrupted runs are in test_ctrl_c.py.
"""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import find_launcher, run_command, run_ranks
from program import LIMIT, PROGRAM, environment, metrics, mpipar, one_block

needs_mpiexec = pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]")
TINY = """--layers 2 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --num-microbatches 2
    --sample-tokens 4""".split()
SHORT = [*TINY, "--steps", "2"]


@pytest.fixture
def here(tmp_path):
    """A folder to start in, with a text in it."""
    (tmp_path / "text.txt").write_text("a short text, again and again. " * 30)
    return tmp_path


def train(here, *words, ranks=None, env=None):
    return mpipar("train", "--data", "text.txt", *words, ranks=ranks, env=env, cwd=here)


def left_behind(here):
    return sorted(path.name for path in here.iterdir() if path.name != "text.txt")


# --- bad input: one block, the right code, nothing left behind


def token_file(path, ids, dtype="<u2", header=None):
    with open(path, "wb") as file:
        if header is not None:
            file.write(np.array([*header, *[0] * (256 - len(header))], "<i4").tobytes())
        file.write(np.array(ids, dtype).tobytes())


def make_files(here):
    (here / "empty.txt").write_bytes(b"")
    (here / "empty_folder").mkdir()
    token_file(here / "odd.bin", [1, 2, 3], "u1")
    token_file(here / "high.bin", [7, 300, 8] * 100)
    token_file(here / "short.bin", [1, 2], header=(20240520, 1, 9))
    token_file(here / "none.bin", [], header=(20240520, 1, 0))
    token_file(here / "llama.bin", [1, 2, 3], "<u4", header=(20240801, 7, 3))
    (here / "weights").mkdir()
    (here / "weights" / "config.json").write_text("[1, 2]")


BAD = {  # words: exit code, what the block must say
    "--data nowhere.txt": (65, ["nowhere.txt", "no such file", "looked in"]),
    "--data empty.txt": (65, ["empty.txt", "is empty"]),
    "--data empty_folder": (65, ["empty_folder", "holds no file"]),
    "--data odd.bin": (65, ["odd.bin", "3 bytes", "uint16"]),
    "--data high.bin": (65, ["token 300 at position 1", "vocabulary of 256", "--vocab-size 301"]),
    "--data short.bin": (65, ["short.bin", "9 tokens", "1,028 bytes"]),
    "--data none.bin": (65, ["none.bin", "no token"]),
    "--data llama.bin": (65, ["llama.bin", "Llama 3"]),
    "--data text.txt high.bin": (65, ["mixes token files"]),
    "--vocab-size 50257": (65, ["text.txt", "bytes", "50,257"]),
    "--vocab-size 100 --prompt AA": (65, ["text.txt", "outside the vocabulary of 100"]),
    "--batch-size 400": (65, ["930 tokens", "400 rows x 5 tokens", "--batch-size"]),
    "--seq-len 500": (65, ["930 tokens", "4 rows x 500 tokens", "--seq-len"]),
    "--heads 3": (2, ["--heads 3", "must divide --d-model 8", "use 1, 2"]),
    "--lr nan": (2, ["--lr nan", "finite"]),
    "--lr -1e-3": (2, ["--lr -0.001", "greater than 0"]),
    "--learning-rate 1": (2, ["--learning-rate", "did you mean --lr?"]),
    "--seq-length 4": (2, ["--seq-length", "did you mean --seq-len?"]),
    "--steps many": (2, ["--steps many", "whole number"]),
    "--tp 2": (2, ["tp 2", "1 was started", "mpiexec -n 2", "--layout dp=1,pp=1,tp=1"]),
    "--cp 2": (2, ["--cp 2", "not built"]),
    "--prompt=": (2, ["--prompt ''", "at least one token"]),
    "--init-from nowhere": (65, ["--init-from nowhere", "config.json"]),
    "--init-from .": (65, ["--init-from .: config.json", "give weights"]),
    "--init-from weights": (65, ["--init-from weights", "not a GPT-2 configuration"]),
}  # fmt: skip


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused(words, here):
    make_files(here)
    before = left_behind(here)
    result = train(here, *SHORT, "--out", "run", *words.split())
    code, block = one_block(result)
    expected, parts = BAD[words]
    assert code == expected, result.tail()
    assert all(part in block for part in parts), result.tail()
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert left_behind(here) == before


def test_built_in_text_needs_a_vocabulary_of_bytes(here):
    for vocab_size in ("100", "50257"):
        code, block = one_block(
            mpipar("train", *SHORT, "--vocab-size", vocab_size, "--prompt", "1 2", cwd=here)
        )
        assert code == 65
        assert f"vocabulary of {int(vocab_size):,}" in block
        assert left_behind(here) == []


@needs_mpiexec
def test_all_problems_at_once_and_one_block(here):
    (here / "run").mkdir()
    (here / "run" / "notes.txt").write_text("mine")
    result = train(here, *SHORT, "--out", "run", "--lr", "-1", "--heads", "3", "--stepps", "4",
                   "--data", "nowhere.txt", ranks=3)
    code, block = one_block(result)
    assert code == 2
    for part in ("--stepps", "did you mean --steps?", "--lr -1", "--heads 3",
                 "run exists and is not empty", "nowhere.txt"):
        assert block.count(part) == 1, (part, result.tail())
    assert left_behind(here) == ["run"]
    assert [path.name for path in (here / "run").iterdir()] == ["notes.txt"]


@needs_mpiexec
@pytest.mark.parametrize(("ranks", "words", "parts"), [
    (2, "--tp 2 --heads 1 --ffn 7", ["--heads 1: must be a multiple of tp 2", "--heads 2 or 4"]),
    (2, "--pp 2 --layers 1", ["--pp 2", "--layers is 1"]),
    (2, "--dp 2 --pp 2", ["dp 2 x pp 2 = 4", "2 were started", "--layout dp=2,pp=1,tp=1"]),
    (3, "--dp 3", ["--batch-size 4", "dp 3 * 2", "use --batch-size 6"]),
])  # fmt: skip
def test_layout_that_does_not_fit_is_refused(ranks, words, parts, here):
    result = train(here, *SHORT, "--out", "run", *words.split(), ranks=ranks)
    code, block = one_block(result)
    assert code == 2
    assert all(part in block for part in parts), result.tail()
    assert left_behind(here) == []


@pytest.mark.parametrize("words", [
    "--seq-len 1", "--d-model 5 --heads 5", "--vocab-size 257", "--vocab-size 511",
    "--layers 1 --ffn 1", "--batch-size 2 --num-microbatches 1 --steps 1",
])  # fmt: skip
def test_odd_sizes_train(words, here):
    result = train(here, *SHORT, "--out", "run", *words.split())
    assert result.returncode == 0, result.tail()
    assert metrics(here / "run")[-1]["loss"] > 0


# --- run folder


def test_run_folders_are_numbered_and_named(here):
    for words in ([], [], ["--run-name", "mine"], []):
        assert train(here, *SHORT, *words).returncode == 0
    assert sorted(p.name for p in (here / "runs").iterdir()) == ["0001", "0002", "0003", "mine"]
    assert left_behind(here) == ["runs"]


def test_two_runs_at_once_get_two_folders(here):
    command = [*PROGRAM, "train", "--data", "text.txt", *SHORT]
    env = {**os.environ, **environment()}
    runs = [subprocess.Popen(command, cwd=here, env=env, stdout=subprocess.DEVNULL)
            for _ in range(3)]  # fmt: skip
    assert [run.wait(LIMIT) for run in runs] == [0, 0, 0]
    folders = sorted((here / "runs").iterdir())
    assert [folder.name for folder in folders] == ["0001", "0002", "0003"]
    assert all(len(metrics(folder)) == 2 for folder in folders)


def test_existing_folder_is_used_only_when_empty(here):
    (here / "fresh").mkdir()
    assert train(here, *SHORT, "--out", "fresh").returncode == 0
    files = {path.name: path.read_bytes() for path in (here / "fresh").rglob("*") if path.is_file()}
    for name, why in (("fresh", "never overwrites"), ("text.txt", "text.txt is a file")):
        code, block = one_block(train(here, *SHORT, "--out", name))
        assert code == 2
        assert why in block
    assert files == {path.name: path.read_bytes() for path in (here / "fresh").rglob("*")
                     if path.is_file()}  # fmt: skip


def test_name_and_folder_exclude_each_other(here):
    code, block = one_block(train(here, *SHORT, "--out", "run", "--run-name", "name"))
    assert code == 2
    assert "--run-name name and --out run" in block
    assert left_behind(here) == []


def test_folder_that_cannot_be_made(here):
    code, block = one_block(train(here, *SHORT, "--out", "text.txt/run"))
    assert code in (2, 74)
    assert "text.txt/run" in block
    assert "Traceback" not in block


FULL_DISK = """
import resource, sys
from mpipar import cli
from mpipar.job import session as launch
plain = launch.Session.start
def start(self):
    world = plain(self)  # MPI makes files too, in shared memory
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
    return world
launch.Session.start = start
launch.guard(cli.main, sys.argv[2:])
"""


@needs_mpiexec
@pytest.mark.parametrize("limit", [500, 1000, 8000], ids=["config", "log", "weights"])
def test_full_disk_is_said_with_code_74(limit, here):
    """A limit on the size of files stands for the disk."""
    command = [sys.executable, "-c", FULL_DISK, str(limit), "train", "--data", "text.txt", *SHORT,
               "--out", "run"]
    code, block = one_block(run_ranks(2, command, LIMIT, environment(), here))
    assert code == 74
    assert "File too large" in block
    assert "run" in block
    assert "Traceback" not in block
    assert not list((here / "run").glob("weights/*.safetensors*"))


PART_OF_A_FILE = """
import resource, sys
from pathlib import Path
from mpipar import errors
from mpipar.job import failure
from mpipar.console import output
folder, said = Path(sys.argv[1]), []
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
try:
    output.write_text(folder / "report.html", "<html>" * 10)
except errors.OutputError as error:
    said.append(str(error))
said.append(failure.claim([folder / "errors"], 0, failure.report(ValueError("no"), "")))
resource.setrlimit(resource.RLIMIT_FSIZE, before)
print(said)
"""


def test_a_file_that_did_not_fit_is_not_left_as_a_part(tmp_path):
    """In a process of its own: the limit would also hold for what the tests write."""
    done = run_command([sys.executable, "-c", PART_OF_A_FILE, str(tmp_path)], LIMIT, environment())
    assert done.returncode == 0, done.tail()
    assert "report.html: File too large" in done.stdout
    assert "(70, True, None)" in done.stdout
    assert [path.name for path in tmp_path.rglob("*")] == ["errors"]


# --- text that the console can't show


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_console_of_another_encoding(encoding, here):
    """Files are UTF-8 whatever the locale says, and the console shows what it can."""
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0",
              "PYTHONIOENCODING": encoding}
    (here / "prompt.toml").write_text('prompt = "caf\u00e9 \u20ac"', "utf-8")
    result = train(here, *SHORT, "--out", "run", "--config", "prompt.toml", env=locale)
    assert result.returncode == 0, result.tail()
    assert "caf\u00e9 \u20ac" in (here / "run" / "log.txt").read_text("utf-8")
    assert 'prompt = "caf\u00e9 \u20ac"' in (here / "run" / "config.toml").read_text("utf-8")
    assert "The " not in result.stdout
    assert "text generated from 'caf" in result.stdout
    result = mpipar("generate", "run", "--prompt", "a", "--seed", "2", cwd=here, env=locale)
    assert result.returncode == 0, result.tail()
    assert "?" in result.stdout, "this seed makes a byte that is no text"
    code, block = one_block(train(here, *SHORT, "--prompt", "\u20ac", env=locale))
    assert code == 2, "Python could not read the prompt"
    assert "not valid UTF-8" in block


# --- a loss that is not finite


@needs_mpiexec
def test_non_finite_loss_ends_all_ranks(here):
    result = train(here, *TINY, "--steps", "50", "--out", "run", "--lr", "1e30", "--clip", "0",
                   "--warmup-steps", "0", "--optimizer", "sgd", ranks=4)
    code, block = one_block(result)
    assert code == 79
    assert re.search(r"step \d+: loss \S+, gradient norm \S+: .*--lr \(now 1e\+30\)", block)
    assert not (here / "run" / "weights").exists(), "weights that are NaN are of no use"
    steps = [line["step"] for line in metrics(here / "run")]
    assert steps == list(range(1, len(steps) + 1))
    failed = int(re.search(r"step (\d+): loss", block)[1])
    assert failed == len(steps) + 1, "the steps before the failure are in the file"
