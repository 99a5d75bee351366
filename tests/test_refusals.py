"""Refusals of `mpipar train`: exit code, message, and no file left behind.

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


def check(folder, code, parts, *words, ranks=1, data=("--data", "text.txt")):
    """Check one refusal; the folder must be as it was."""
    before = contents(folder)
    assert_refused(code, parts, "train", *data, *SHORT, "--out", "run", *words, ranks=ranks,
                   folder=folder)
    assert contents(folder) == before


# --- data


def token_file(path, ids, dtype="<u2", header=None):
    """Write token ids, behind a header of 256 numbers if one is given."""
    with open(path, "wb") as file:
        if header is not None:
            file.write(np.array([*header, *[0] * (256 - len(header))], "<i4").tobytes())
        file.write(np.array(ids, dtype).tobytes())


def test_data_that_is_not_there(text_folder):
    (text_folder / "empty.txt").write_bytes(b"")
    (text_folder / "empty_folder").mkdir()
    check(text_folder, 65, ["nowhere.txt", "no such file", "looked in"], "--data", "nowhere.txt")
    check(text_folder, 65, ["empty.txt", "is empty"], "--data", "empty.txt")
    check(text_folder, 65, ["empty_folder", "holds no file"], "--data", "empty_folder")


@pytest.mark.parametrize(("content", "parts"), [
    ({"ids": [1, 2, 3], "dtype": "u1"}, ["3 bytes", "uint16"]),
    ({"ids": [7, 300, 8] * 100},
     ["token 300 at position 1", "vocabulary of 256", "--vocab-size 301"]),
    ({"ids": [1, 2], "header": (20240520, 1, 9)}, ["9 tokens", "1,028 bytes"]),
    ({"ids": [], "header": (20240520, 1, 0)}, ["no token"]),
    ({"ids": [1, 2, 3], "dtype": "<u4", "header": (20240522, 7, 3)}, ["HellaSwag"]),
], ids=["odd size", "high token", "too short", "empty", "of HellaSwag"])
def test_token_file_that_cannot_be_read(content, parts, text_folder):
    token_file(text_folder / "ids.bin", **content)
    check(text_folder, 65, ["ids.bin", *parts], "--data", "ids.bin")


def test_text_and_tokens_do_not_mix(text_folder):
    token_file(text_folder / "ids.bin", [7, 8] * 100)
    check(text_folder, 65, ["mixes token files"], "--data", "text.txt", "ids.bin")


@pytest.mark.parametrize(("words", "parts"), [
    ("--vocab-size 50257", ["text.txt", "bytes", "50,257"]),
    ("--vocab-size 100 --prompt AA", ["text.txt", "outside the vocabulary of 100"]),
])
def test_text_outside_the_vocabulary(words, parts, text_folder):
    check(text_folder, 65, parts, *words.split())


@pytest.mark.parametrize("vocab_size", [100, 50257])
def test_built_in_text_needs_a_vocabulary_of_bytes(vocab_size, tmp_path):
    check(tmp_path, 65, [f"vocabulary of {vocab_size:,}"],
          "--vocab-size", vocab_size, "--prompt", "1 2", data=())


@pytest.mark.parametrize(("words", "parts"), [
    ("--batch-size 400", ["930 tokens", "400 rows x 5 tokens", "--batch-size"]),
    ("--seq-len 500", ["930 tokens", "4 rows x 500 tokens", "--seq-len"]),
])
def test_data_too_short_for_a_step(words, parts, text_folder):
    check(text_folder, 65, parts, *words.split())


@pytest.mark.parametrize(("folder", "parts"), [
    ("nowhere", ["nothing is downloaded"]), ("weights", ["config.json: is not an object"]),
    (".", ["config.json: is not an object"]),  # a run stands for its weights
])
def test_weights_that_cannot_be_read(folder, parts, text_folder):
    (text_folder / "weights").mkdir()
    (text_folder / "weights" / "config.json").write_text("[1, 2]")
    where = "--init-from weights" if folder == "." else f"--init-from {folder}"
    check(text_folder, 65, [where, *parts], "--init-from", folder)


# --- flags and layout


@pytest.mark.parametrize(("ranks", "words", "parts"), [
    (1, "--prompt=", ["--prompt ''", "at least one token"]),
    (1, "--tp 2", ["--tp 2", "on 1 rank", "mpiexec -n 2", "--layout dp=1,pp=1,tp=1"]),
    (2, "--dp 2 --pp 2", ["--dp 2 with --pp 2", "on 2 ranks", "--layout dp=2,pp=1,tp=1"]),
])
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
    result = mpipar("train", *SHORT, "--out", "run", "--lr", "-1", "--heads", "3", "--stepps", "4",
                    "--data", "nowhere.txt", ranks=3, cwd=text_folder)
    block = block_of(result, 2)
    for part in ("--stepps", "did you mean --steps?", "--lr -1", "--heads 3",
                 "run exists and is not empty", "nowhere.txt"):
        assert block.count(part) == 1, (part, result.tail())
    assert sorted(path.name for path in text_folder.rglob("*")) == ["notes.txt", "run", "text.txt"]


def test_bad_data_ends_with_its_code_and_one_block(text_folder):
    result = mpipar("train", *SHORT, "--out", "run", "--data", "text.txt", "--vocab-size", "50257",
                    cwd=text_folder)
    block_of(result, 65, "text.txt")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert [path.name for path in text_folder.iterdir()] == ["text.txt"]
