"""The command line: its output, its refusals with the right code, and the modules it loads."""

import configparser
import errno
import json
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from config_helpers import reading_of
from helpers import REPOSITORY, run_command
from in_process import assert_refused, printed, refusal
from program import block_of, mpipar

from mpipar import __version__, cli, errors
from mpipar.config.sections import FIELDS, FLAGS
from mpipar.config.setting import flag
from mpipar.errors import UsageError
from mpipar.models.on_shapes import all_params
from mpipar.run.process import failure
from mpipar.run.resolve import resolve

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


def test_a_broken_disk_is_said_without_saying_which_way():
    broken = failure.error_report(OSError(errno.EIO, "Input/output error", "text.txt"), "rank 0")
    assert broken.exit_code == 74
    assert broken.what == ("text.txt can't be read or written: Input/output error",)


def listed(text):
    """The flags that a help text explains."""
    return re.findall(r"^  (?:-h, )?--([a-z0-9-]+)[ ,\n]", text + "\n", re.MULTILINE)


@pytest.mark.parametrize("command", CONFIGURED)
def test_help_all_of_a_command_lists_every_flag_with_its_reason(command):
    text = printed(command, "--help-all")
    solid = "".join(text.split())
    names = listed(text)
    assert len(names) == len(set(names))
    for field in map(FIELDS.get, FLAGS):
        used = field.name in cli.command_of(command).fields
        own = field.name in cli.command_of(command).arguments.__dataclass_fields__
        assert (flag(field.name)[2:] in names) == (used or own)
        said = cli.command_of(command).help_of.get(field.name, field.metadata["help"])
        assert used <= ("".join(said.split()) in solid), field.name
    assert {"layout", "config", "print-config", "help", "help-all"} < set(names)
    assert ("machine" in names) == (command in ("train", "explain"))
    assert "exit codes:" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(("words", "refused_flags"), [
    (["verify", "--print-config", "--trace", "2:3", "--memory-limit=9"],
     ["--trace", "--memory-limit"]),
    (["explain", "--steps", "3", "--memory-limit", "9"], ["--steps"]),
    (["verify", "--print-config", "--eval-interval", "5", "--lr-schedule", "wsd", "--tensorboard"],
     ["--eval-interval", "--lr-schedule", "--tensorboard"]),
    (["trace", "run", "--dp", "3"], ["--dp"]),
])  # fmt: skip
def test_a_flag_that_a_command_does_not_use_is_refused(words, refused_flags):
    assert refused(*words) == [
        f"{word}: mpipar {words[0]} does not use it; leave it out" for word in refused_flags
    ]


def test_a_file_with_the_keys_of_a_run_is_taken_by_every_command(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('steps = 7\ntrace = "2:3"\n')
    for command in ("verify", "explain"):
        assert "steps = 7" in printed(command, "--config", str(file), "--print-config")


def test_version_is_that_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    assert setup["metadata"]["version"] in (__version__, "attr: mpipar.__version__")
    assert printed("--version") == f"mpipar {__version__}\n"


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
import mpipar.run.process.blas
print("kernels", loaded("numpy"))
"""


def test_flags_are_read_and_kernels_chosen_before_numpy_is_loaded():
    """And nothing heavy is loaded before the guard has set the number of threads."""
    of_ranks = [name for name in cli.COMMANDS if cli.command_of(name).needs_mpi]
    result = run_command([sys.executable, "-c", LOADED, *of_ranks], LIMIT)
    shown = [f"{what} []" for what in ("start", *of_ranks, "kernels")]
    assert result.stdout.splitlines() == shown, result.tail()


def test_nothing_below_the_command_line_sees_what_argparse_makes():
    """What was typed goes down as frozen values: arguments of a command, and a Config."""
    package = REPOSITORY / "mpipar"
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "argparse" in path.read_text()
    }
    assert users == {"cli.py", "config/flags.py"}
    for name in cli.COMMANDS:
        assert cli.command_of(name).arguments.__dataclass_params__.frozen, name


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
            ["--foo", "--pp four", "--latency: 'x'", "leave --svg out"],
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
        ("learn ffn --seed x --foo", ["--foo", "--seed"]),
        ("trace RUN --html a --perfetto ./a --foo", ["--foo", "give two files"]),
    ],
)
def test_own_arguments_name_all_mistakes_at_once(words, parts):
    found = refused(*words.split())
    text = "\n".join(found)
    assert [part for part in parts if part not in text] == [], text
    assert len(found) == len(set(found)) == len(parts), text


# --- the resolved configuration


def test_print_config_is_toml_for_the_ranks_that_were_started():
    for world_size, axes in ((1, (1, 1, 1)), (4, (1, 2, 2)), (3, (3, 1, 1))):
        text = printed("train", "--print-config", ranks=world_size)
        assert text.startswith("# batch size 16 ") == (world_size == 3), "a comment says: rounded"
        found = tomllib.loads(text)
        assert (found["dp"], found["pp"], found["tp"]) == axes
        assert found["batch-size"] % (found["dp"] * found["num-microbatches"]) == 0


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


def test_all_mistakes_of_flags_and_a_file_at_once(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("bath-size = 3\nlr = nan\n")
    words = "--learning-rat 3 --stps 5 --steps x --tp 3 --batch-size 7 --schedule no".split()
    text = "\n".join(refused("train", *words, "--config", str(file), "--print-config"))
    expected = [
        "--learning-rat", "--stps: unknown flag; did you mean --steps?", "--steps x",
        "bath-size: unknown key; did you mean --batch-size?", "--lr nan", "tp 3",
        "--heads 4", "--schedule 'no'",
    ]  # fmt: skip
    assert [word for word in expected if word not in text] == [], text


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
    """Other files of data are in test_data.py."""
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
