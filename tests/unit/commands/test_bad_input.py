"""Whatever is typed and named, a command ends with words: no traceback, no silence, no long wait.

In turn, each flag and each argument of every command gets values and files that it cannot mean.
"""

import itertools
import os
import shutil

import pytest
from in_process import alone, at_once

from mpipar import cli, errors
from mpipar.config.sections import FIELDS
from mpipar.study.schedules import explorer

SMALL = """--layers 1 --d-model 8 --heads 2 --seq-len 8 --batch-size 4 --num-microbatches 1
    --data text.txt""".split()
BASES = {  # of each command, words that are fine
    "train": [*SMALL, "--steps", "1", "--sample-tokens", "1", "--out", "new"],
    "generate": ["run", "--sample-tokens", "1"],
    "verify": SMALL,
    "data": ["prepare", "text.txt", "--tokenizer", "bytes", "--out", "new"],
    "ckpt": ["verify", "run"],
    "schedule": ["1f1b"],
    "trace": ["run"],
    "compare": ["run", "run"],
    "explain": SMALL,
    "plan": ["tiny", "--ranks", "4", "--machine", "h100"],
    "learn": [],
    "net": ["show", "empty"],
    "doctor": [],
}
VALUES = ["", "0", "-1", "1e400", "nan", "-inf", "9" * 30, "9" * 5000, "x", "\u0663", "\udcff"]
VALUES += ["1.5", ",", "a=b", "2147483648", "1e-320", "\x1b[31m", "%s{}", "a" * 5000, "1:2", "-"]
FILES = {
    "empty": b"",
    "binary": bytes(range(256)) * 9,
    "\u00fcn\u00ef.txt": "gr\u00f6\u00dfe \U0001f600".encode() * 99,
    "deep.json": b"[" * 100_000,
    "object.json": b"{}",
    "bad.toml": b"a = [\n",
    "passes.csv": b"0F0,0B0\n",
}
WRITTEN = {"--svg", "--csv", "--html", "--perfetto", "--json", "--sheet"}  # a pipe waits, rightly
BAD = [*VALUES, *FILES, "missing", "folder", "folder/x", "text.txt/x", "pipe", "run"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with such files, and the run of a small model with a trace."""
    made = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (made / name).write_bytes(content)
    (made / "text.txt").write_text("the cat sat on the mat. " * 99)
    (made / "folder").mkdir()
    os.mkfifo(made / "pipe")
    words = ["--steps", "4", "--trace", "2:3", "--sample-tokens", "0", "--out", "run"]
    alone("train", *SMALL, *words, cwd=made).ended()
    return made


def cases(command):
    """Command lines with one thing that is bad: each argument and flag in turn.

    The settings of a configuration, which several commands take, are tried with the first.
    """
    base, bad = BASES[command], itertools.cycle(BAD)
    arguments = itertools.takewhile(lambda word: not word.startswith("-"), base)
    for place, _ in enumerate(arguments):
        yield from ([*base[:place], one, *base[place + 1 :]] for one in BAD)
    for action in cli.command_parser(command, every=True)._actions:
        is_setting = action.dest in FIELDS
        if action.option_strings and action.nargs != 0 and (command == "train" or not is_setting):
            name = action.option_strings[-1]
            bounds = ["-1", "9" * 30] if action.metavar in ("N", "X") else []  # of a number
            some = [*bounds, *itertools.islice(bad, 1 if is_setting else 6)]
            yield from (
                [*base, f"{name}={one}"] for one in some if one != "pipe" or name not in WRITTEN
            )


@pytest.mark.parametrize("command", BASES)
def test_bad_input_ends_in_words(command, folder, monkeypatch):
    monkeypatch.setattr(explorer, "known_orders", dict)  # making them all takes seconds
    for words in cases(command):
        with at_once():
            done = alone(command, *words, cwd=folder)
        text = done.stdout + done.stderr
        assert done.returncode in {*errors.EXIT_CODES} - {errors.EXIT_INTERNAL}, (words, text)
        assert text.strip(), words
        assert "Traceback" not in text, words
        assert "\x1b" not in text, words
        shutil.rmtree(folder / "new", ignore_errors=True)


def test_every_command_is_tried():
    assert BASES.keys() == cli.COMMANDS.keys()
