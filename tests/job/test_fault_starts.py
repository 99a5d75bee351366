"""Faults at start-up: flags, data, the run folder, checkpoints; each with real ranks.

Most refusals are tested in this process elsewhere. Here the program is started as a user does, for
the table in docs/failures.md.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from damage import flip
from fault_table import fault
from program import LETTERS, metrics, mpipar, one_block

pytestmark = pytest.mark.slow
RUN = """train --pp 2 --layers 3 --d-model 8 --heads 2 --seq-len 5 --batch-size 4
    --num-microbatches 2 --steps 4 --save-interval 2 --sample-tokens 0""".split()
ON = "--out run --resume auto --steps 6"  # go on in the run that is there
BY_PATH = "--resume run --steps 6"
LLMC, HELLASWAG = (20240520, 1), (20240522, 1)


@dataclass(frozen=True)
class Start:
    """A fault: number, what it is, flags, exit code, what is said, and what happens before."""

    number: int
    what: str
    words: str
    code: int
    said: str
    before: Callable = lambda folder: None
    ranks: int | None = 2


def tokens(*ids, magic=None, count=None):
    """A function that writes a token file; count: what its header says."""

    def write(folder: Path):
        head = b"" if magic is None else np.array([*magic, count, *[0] * 253], "<i4").tobytes()
        (folder / "ids.bin").write_bytes(head + np.array(ids, "<u2").tobytes())

    return write


def newest(folder, name):
    return folder / "run" / "checkpoints" / "step-00000004" / name


def cut(folder):
    path = newest(folder, "pieces-00001.safetensors")
    path.write_bytes(path.read_bytes()[:-5])


def edit_manifest(edit):
    """A function that changes a value of the manifest, and its own digest."""

    def change(folder):
        path = newest(folder, "manifest.json")
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content))

    return change


def steal_piece(manifest):
    manifest["files"]["../../../text.txt"] = manifest["files"].pop("pieces-00001.safetensors")


STARTS = (
    Start(1, "the layout needs another number of ranks", "--pp 4", 2, "on 2 ranks"),
    Start(
        2,
        "heads, widths and layers that cannot be cut",
        "--pp 1 --tp 2 --heads 1 --ffn 7",
        2,
        "--heads 1 with --tp 2",
    ),
    Start(3, "a misspelt flag", "--stepps 4", 2, "did you mean --steps?"),
    Start(3, "a learning rate that is NaN", "--lr nan", 2, "finite"),
    Start(4, "a batch that cannot be cut", "--batch-size 3", 2, "--batch-size 3"),
    Start(4, "no microbatch", "--num-microbatches 0", 2, "--num-microbatches 0"),
    Start(
        4,
        "fewer microbatches than stages: the bubble is shown",
        "--num-microbatches 1",
        0,
        "bubble",
    ),
    Start(6, "the run folder exists", "--out run", 2, "--resume auto"),
    Start(7, "the run folder cannot be made", "--out text.txt/run", 74, "text.txt/run"),
    Start(7, "the run folder cannot be written", "--out /proc/run", 74, "/proc/run"),
    Start(8, "no such data", "--data nowhere.txt", 65, "nowhere.txt: no such file"),
    Start(
        8,
        "an empty file as data",
        "--data empty.txt",
        65,
        "is empty",
        lambda folder: (folder / "empty.txt").touch(),
    ),
    Start(
        9,
        "tokens of another format",
        "--data ids.bin",
        65,
        "HellaSwag",
        tokens(1, 2, 3, magic=HELLASWAG, count=3),
    ),
    Start(
        10,
        "fewer tokens than the header says",
        "--data ids.bin",
        65,
        "9 tokens",
        tokens(1, 2, magic=LLMC, count=9),
    ),
    Start(
        11,
        "a token outside the vocabulary",
        "--data ids.bin",
        65,
        "token 300 at position 1",
        tokens(*[7, 300, 8] * 100),
    ),
    Start(13, "less data than two rows", "--seq-len 4000", 65, "fewer than one row to train on"),
    Start(
        14,
        "data that changed since the save",
        ON,
        65,
        "has changed since",
        lambda folder: (folder / "text.txt").write_text(LETTERS.replace("again", "often")),
    ),
    Start(
        16,
        "a truncated file: --resume auto takes the checkpoint before",
        ON,
        0,
        "pieces-00001.safetensors",
        cut,
    ),
    Start(16, "a truncated file: --resume PATH", BY_PATH, 65, "pieces-00001.safetensors", cut),
    Start(
        17,
        "a flipped bit of a tensor",
        BY_PATH,
        65,
        "pieces-00001.safetensors",
        lambda folder: flip(newest(folder, "pieces-00001.safetensors"), 0.9),
    ),
    Start(
        17,
        "a flipped bit of a file's header",
        BY_PATH,
        65,
        "pieces-00001.safetensors",
        lambda folder: flip(newest(folder, "pieces-00001.safetensors"), 0.01),
    ),
    Start(
        17,
        "a flipped bit of the manifest",
        BY_PATH,
        65,
        "manifest.json",
        lambda folder: flip(newest(folder, "manifest.json")),
    ),
    Start(
        18,
        "a missing file",
        BY_PATH,
        65,
        "pieces-00000.safetensors",
        lambda folder: newest(folder, "pieces-00000.safetensors").unlink(),
    ),
    Start(19, "another layout", f"{ON} --pp 1 --tp 2", 0, "step 6/6"),
    Start(20, "another model", f"{ON} --d-model 16", 2, "which has 8"),
    Start(
        23,
        "a manifest that names a file outside",
        BY_PATH,
        65,
        "manifest.json",
        edit_manifest(steal_piece),
    ),
    Start(
        24,
        "a checkpoint of a newer format",
        BY_PATH,
        65,
        "format",
        edit_manifest(lambda manifest: manifest.update(format=99)),
    ),
    Start(
        35, "several ranks are needed, and no launcher is there", "", 2, "mpiexec -n 2", ranks=None
    ),
    Start(40, "no GPU, or no CuPy", "--device cuda", 69, "--device cuda"),
)


@pytest.fixture(scope="module")
def folder_of_a_run(tmp_path_factory):
    """A folder with a text and a finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text(LETTERS)
    mpipar(*RUN, "--data", "text.txt", "--out", "run", ranks=2, cwd=folder).ended()
    return folder


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(
            one,
            id=f"{one.number}-{one.what}".replace(" ", "-"),
            marks=fault(one.number, one.what, one.code),
        )
        for one in STARTS
    ],
)
def test_a_start_with_a_fault(start, folder_of_a_run, tmp_path):
    here = tmp_path / "here"
    shutil.copytree(folder_of_a_run, here)
    start.before(here)
    before = metrics(here / "run")
    words = start.words.split()
    data = [] if {"--data", "--resume"} & {*words} else ["--data", "text.txt"]
    result = mpipar(*RUN, *data, *words, ranks=start.ranks, cwd=here)
    if start.code:
        code, block = one_block(result)
        assert (code, start.said in block) == (start.code, True), result.tail()
        assert "Traceback" not in result.stderr
        assert metrics(here / "run") == before, "a refused start changes nothing"
        assert not (here / "runs").exists()
    else:
        assert result.returncode == 0, result.tail()
        assert start.said in result.stdout, result.tail()
