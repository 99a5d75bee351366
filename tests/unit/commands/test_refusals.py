"""Refusals of `mpipar train`: exit code, message, and no file left on disk.

Each kind of mistake has one test, in this process. At the end, two starts show that the exit code
reaches the shell and that all ranks print one block.
"""

import numpy as np
import pytest
from in_process import assert_refused
from program import block_of, mpipar

SHORT = """--layers 2 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --num-microbatches 2
    --sample-tokens 4 --steps 2""".split()


def contents(folder):
    """The contents of a folder: {path: bytes of the file, None for a folder}."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def check(folder, code, parts, *words, ranks=1):
    """Check one refusal; the folder must be as it was."""
    before = contents(folder)
    assert_refused(
        code,
        parts,
        "train",
        "--data",
        "text.txt",
        *SHORT,
        "--out",
        "run",
        *words,
        ranks=ranks,
        folder=folder,
    )
    assert contents(folder) == before


# --- data and weights


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--data nowhere.txt", ["nowhere.txt", "no such file", "looked in"]),
        (
            "--data ids.bin",
            ["ids.bin", "token 300 at position 1", "vocabulary of 256", "--vocab-size 301"],
        ),
        ("--data text.txt ids.bin", ["mixes token files"]),
        ("--vocab-size 100", ["text.txt", "outside the vocabulary of 100"]),
        ("--seq-len 500", ["930 tokens", "fewer than one row to train on", "--seq-len"]),
        ("--init-from nowhere", ["--init-from nowhere", "nothing is downloaded"]),
        ("--init-from weights", ["--init-from weights", "config.json: is not an object"]),
        (
            "--init-from .",
            ["--init-from weights", "config.json: is not an object"],
        ),  # those of a run
    ],
)
def test_data_and_weights_that_cannot_be_read(words, parts, text_folder):
    """Other files of data are in test_source.py."""
    np.array([7, 300, 8] * 100, "<u2").tofile(text_folder / "ids.bin")
    (text_folder / "weights").mkdir()
    (text_folder / "weights" / "config.json").write_text("[1, 2]")
    check(text_folder, 65, parts, *words.split())


# --- flags and layout


@pytest.mark.parametrize(
    ("ranks", "words", "parts"),
    [
        (1, "--tp 2", ["--tp 2", "on 1 rank", "mpiexec -n 2", "leave an axis out"]),
        (2, "--dp 2 --pp 2", ["--dp 2 with --pp 2", "on 2 ranks", "mpiexec -n 4"]),
    ],
)
def test_flags_that_cannot_be_meant(ranks, words, parts, text_folder):
    """Each row of the table of combinations has its test in test_combinations.py."""
    check(text_folder, 2, parts, *words.split(), ranks=ranks)


# --- the run folder


def test_folder_of_another_run_is_left_alone(text_folder):
    (text_folder / "mine").mkdir()
    (text_folder / "mine" / "notes.txt").write_text("mine")
    for name, why in (("mine", "never overwrites"), ("text.txt", "text.txt is a file")):
        check(text_folder, 2, [why], "--out", name)


def test_folder_that_cannot_be_made(text_folder):
    check(text_folder, 74, ["text.txt/run"], "--out", "text.txt/run")


# --- how it reaches the shell


def test_all_problems_at_once_and_one_block(text_folder):
    (text_folder / "run").mkdir()
    (text_folder / "run" / "notes.txt").write_text("mine")
    result = mpipar(
        "train",
        *SHORT,
        "--out",
        "run",
        "--lr",
        "-1",
        "--heads",
        "3",
        "--stepps",
        "4",
        "--data",
        "nowhere.txt",
        ranks=3,
        cwd=text_folder,
    )
    block = block_of(result, 2)
    for part in (
        "--stepps",
        "did you mean --steps?",
        "--lr -1",
        "--heads 3",
        "run exists and is not empty",
        "nowhere.txt",
    ):
        assert block.count(part) == 1, (part, result.tail())
    assert sorted(path.name for path in text_folder.rglob("*")) == ["notes.txt", "run", "text.txt"]


def test_bad_data_ends_with_its_code_and_one_block(text_folder):
    result = mpipar(
        "train",
        *SHORT,
        "--out",
        "run",
        "--data",
        "text.txt",
        "--vocab-size",
        "50257",
        cwd=text_folder,
    )
    block_of(result, 65, "text.txt")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert [path.name for path in text_folder.iterdir()] == ["text.txt"]
