"""The command line: its output, its refusals with the right code, and the modules it loads.

Last, each flag and each argument of every command gets values and files that it cannot mean.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from config_helpers import reading_of
from helpers import REPOSITORY, run_command
from in_process import alone, assert_refused, at_once, printed, refusal
from program import block_of, mpipar

from mpipar import cli, errors
from mpipar.config.sections import FIELDS, FLAGS
from mpipar.config.setting import flag
from mpipar.errors import UsageError
from mpipar.models.on_shapes import all_params
from mpipar.run.resolve import resolve
from mpipar.study.schedules import explorer

LIMIT = 60.0
MPIPAR = [sys.executable, "-m", "mpipar"]
SHAPE = {
    "n_layer": 3, "n_embd": 48, "n_head": 4, "n_inner": None, "vocab_size": 300, "n_positions": 32,
    "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip


CONFIGURED = [name for name in cli.COMMANDS if cli.command_of(name).fields]


def refused(*words, ranks=1):
    """The problems reported for a wrong command line."""
    found = refusal(*words, ranks=ranks)
    assert isinstance(found, UsageError), found
    return found.problems


# --- help


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_overview_names_commands_and_exit_codes(words):
    text = printed(*words)
    for name in cli.COMMANDS:
        assert f"\n  {name} " in text
    for code, meaning in errors.EXIT_CODES.items():
        assert f"{code:>3}  {meaning}" in text


@pytest.mark.parametrize(
    "words", ["explain", "schedule gpipe --pp 2", "--help", "--version", "train --print-config"]
)
def test_only_one_rank_prints(words):
    assert printed(*words.split(), ranks=2)
    assert printed(*words.split(), rank=1, ranks=2) == ""


def test_output_to_a_full_disk_is_no_defect():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*MPIPAR, "explain"],
            cwd=REPOSITORY,
            stdout=full,
            text=True,
            stderr=subprocess.PIPE,
            timeout=LIMIT,
            check=False,
        )
    assert done.returncode == 74, done.stderr
    assert "the output can't be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", CONFIGURED)
def test_help_all_of_a_command_lists_every_flag(command):
    text = printed(command, "--help-all")
    names = re.findall(r"^  (?:-h, )?--([a-z0-9-]+)[ ,\n]", text, re.MULTILINE)
    wanted = {flag(name)[2:] for name in cli.command_of(command).fields & {*FLAGS}}
    assert {*wanted, "layout", "config", "print-config", "help", "help-all"} <= {*names}
    assert len(names) == len({*names})


def test_a_file_with_the_keys_of_a_run_is_taken_by_every_command(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('steps = 7\ntrace = "2:3"\n')
    for command in ("verify", "explain"):
        assert "steps = 7" in printed(command, "--config", str(file), "--print-config")


# --- what is loaded


LOADED = """
import sys, mpipar.__main__
from mpipar import cli
def loaded(*names):
    return [name for name in names if name in sys.modules]
print("start", loaded("numpy", "mpi4py", "safetensors"))
for command in sys.argv[1:]:
    cli.context_of(None, command, ["RUN"] if command == "generate" else [])
    print(command, loaded("numpy", "mpi4py.MPI", "safetensors"))
import mpipar.run.process.environment
print("kernels", loaded("numpy"))
"""


def test_flags_are_read_and_kernels_chosen_before_numpy_is_loaded():
    """And nothing heavy is loaded before the guard has set the number of threads."""
    of_ranks = [name for name in cli.COMMANDS if cli.command_of(name).needs_mpi]
    result = run_command([sys.executable, "-c", LOADED, *of_ranks], LIMIT)
    shown = [f"{what} []" for what in ("start", *of_ranks, "kernels")]
    assert result.stdout.splitlines() == shown, result.tail()


# --- all mistakes at once, for every command


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            "explain --rank x --tp 0 --foo",
            ["--foo", "--rank x: must be a whole number", "--tp 0: must be at least 1"],
        ),
        (
            "schedule --pp four --latency x --compare --svg f --foo",
            ["--foo", "--pp four", "--latency x", "leave --svg out"],
        ),
        (
            "ckpt ls runs --step x --max-shard-size 0 --out o",
            ["--step x", "weights are one file, model.safetensors", "--out: ls does not use it"],
        ),
        (
            "plan tiny --machine h100 --ranks 0 --top 101 --zero 2 --foo",
            [
                "--foo",
                "--ranks 0: must be at least 1",
                "--top 101: must be at most 100",
                "--zero 2: must be one of 0, 1, 3",
            ],
        ),
        (
            "learn ffn --seed x --foo",
            ["--foo", "--seed: mpipar learn does not use it; leave it out"],
        ),
        (
            "verify --print-config --trace 2:3 --memory-limit=9 --tensorboard",
            ["--trace", "--memory-limit", "--tensorboard: mpipar verify does not use it"],
        ),
    ],
)
def test_own_arguments_name_all_mistakes_at_once(words, parts):
    found = refused(*words.split())
    text = "\n".join(found)
    assert [part for part in parts if part not in text] == [], text
    assert len(found) == len(set(found)) == len(parts), text


# --- the resolved configuration


def test_print_config_can_be_given_back(tmp_path):
    words = ["--preset", "gpt2", "--layers", "5", "--no-tied", "--stage-layers", "3,2"]
    file = tmp_path / "config.toml"
    file.write_text(printed("train", *words, "--print-config", ranks=2))
    again = printed("train", "--config", str(file), "--print-config", ranks=2)
    assert tomllib.loads(again) == tomllib.loads(file.read_text())


# --- what is refused


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["trian"], ["'trian'", "did you mean train?"]),
        (["train", "--lr"], ["--lr", "expected one argument", "mpipar train --help"]),
        (["generate"], ["RUN", "mpipar generate --help"]),
        (["doctor", "--tp", "2"], ["--tp: mpipar doctor does not use it"]),
        (["verify", "--dtype", "float99", "--heads", "4"], ["--dtype 'float99': must be one of"]),
    ],
)
def test_mistake_is_refused(words, parts):
    found = refused(*words, ranks=2)
    assert len(found) == 1, found
    assert all(part in found[0] for part in parts), found


@pytest.mark.parametrize("words", ["train --help", "explain"])
def test_reader_that_has_seen_enough_gets_no_error(words):
    """As in `mpipar explain | head`, but the reader leaves before anything is printed."""
    script = f"set -o pipefail; {sys.executable} -m mpipar {words} | true"
    result = run_command(["bash", "-c", script], LIMIT)
    assert result.stderr == ""
    assert result.returncode in (errors.EXIT_OK, errors.EXIT_NO_READER)


# --- weights to start from


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return str(tmp_path)


def test_weights_fix_the_shape(weights):
    model = resolve(reading_of("--init-from", weights, "--steps", "3"), 1)[0].model
    assert (model.layers, model.d_model, model.heads, model.ffn) == (3, 48, 4, 192)
    assert (model.vocab_size, model.seq_len, model.tied) == (300, 32, True)
    assert resolve(reading_of("--init-from", weights, "--layers", "3"), 1)[0].model == model


def test_rows_may_be_shorter_than_the_table_of_positions(weights):
    words = ["--init-from", weights, "--seq-len"]
    model = resolve(reading_of(*words, "8"), 1)[0].model
    assert (model.seq_len, model.max_positions) == (8, 32)
    assert [p.shape for _, p in all_params(model, (3,)) if "positions" in p.name] == [(32, 48)]
    with pytest.raises(UsageError, match=r"--seq-len 33: contradicts .* it is 32; leave"):
        resolve(reading_of(*words, "33"), 1)


# --- refusals of `mpipar train`: exit code, message, and no file left on disk


SHORT = """--layers 2 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --num-microbatches 2
    --sample-tokens 4 --steps 2""".split()


def contents(folder):
    """The contents of a folder: {path: bytes of the file, None for a folder}."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        ("--data nowhere.txt", 65, ["nowhere.txt", "no such file", "looked in"]),
        (
            "--data ids.bin",
            65,
            ["ids.bin", "token 300 is outside", "vocabulary of 256", "--vocab-size 301"],
        ),
        ("--data text.txt ids.bin", 65, ["mixes token files"]),
        ("--vocab-size 100", 65, ["text.txt", "outside the vocabulary of 100"]),
        (
            "--seq-len 500",
            65,
            ["429 and 501 tokens", "fewer than one row to train on", "--seq-len"],
        ),
        ("--init-from nowhere", 65, ["--init-from nowhere", "nothing is downloaded"]),
        ("--init-from weights", 65, ["--init-from weights", "config.json: model_type is None"]),
        ("--init-from .", 65, ["--init-from weights", "config.json: model_type is None"]),
        ("--out weights", 2, ["never overwrites"]),
        ("--out text.txt", 2, ["text.txt: Not a directory"]),
        ("--out text.txt/run", 74, ["text.txt/run"]),
    ],
)
def test_what_is_refused_leaves_the_folder_as_it_was(words, code, parts, text_folder):
    """Other files of data are in test_data.py, combinations of flags in test_combinations.py."""
    np.array([7, 300, 8] * 100, "<u2").tofile(text_folder / "ids.bin")
    (text_folder / "weights").mkdir()
    (text_folder / "weights" / "config.json").write_text("[1, 2]")
    before = contents(text_folder)
    usual = ["--data", "text.txt", *SHORT, "--out", "run"]
    assert_refused(code, parts, "train", *usual, *words.split(), folder=text_folder)
    assert contents(text_folder) == before


# --- how it reaches the shell


def test_all_problems_at_once_and_one_block(text_folder):
    """Of flags, a file, a relation, the layout, the run folder and the data."""
    (text_folder / "run").mkdir()
    (text_folder / "run" / "notes.txt").write_text("mine")
    (text_folder / "a.toml").write_text("bath-size = 3\n")
    words = "--out run --lr -1 --heads 3 --stepps 4 --data nowhere.txt --config a.toml --dp 2"
    result = mpipar("train", *SHORT, *words.split(), ranks=3, cwd=text_folder)
    block = block_of(result, 2)
    for part in (
        "--stepps",
        "did you mean --steps?",
        "bath-size: unknown key; did you mean --batch-size?",
        "--lr -1",
        "--heads 3",
        "mpiexec -n 2",
        "run exists and is not empty",
        "nowhere.txt",
    ):
        assert block.count(part) == 1, (part, result.tail())
    names = ["a.toml", "notes.txt", "run", "text.txt"]
    assert sorted(path.name for path in text_folder.rglob("*")) == names


# --- whatever is typed, a command ends with words: no traceback, no silence, no long wait

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
def bad_folder(tmp_path_factory):
    """A folder with bad files, and the run of a small model with a trace."""
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
            some = [*bounds, *itertools.islice(bad, not bounds if is_setting else 4)]
            yield from (
                [*base, f"{name}={one}"] for one in some if one != "pipe" or name not in WRITTEN
            )


@pytest.mark.parametrize("command", BASES)
def test_bad_input_ends_in_words(command, bad_folder, monkeypatch):
    monkeypatch.setattr(explorer, "known_orders", dict)  # making them all takes seconds
    for words in cases(command):
        with at_once():
            done = alone(command, *words, cwd=bad_folder)
        text = done.stdout + done.stderr
        assert done.returncode in {*errors.EXIT_CODES} - {errors.EXIT_INTERNAL}, (words, text)
        assert text.strip(), words
        assert "Traceback" not in text, words
        assert "\x1b" not in text, words
        shutil.rmtree(bad_folder / "new", ignore_errors=True)


def test_every_command_is_tried():
    assert BASES.keys() == cli.COMMANDS.keys()
