"""A run's initial weights: later starts in its folder use them, or refuse if they differ."""

import json
import shutil
from pathlib import Path

import pytest
from config_helpers import reading_of
from damage import flip
from in_process import assert_refused, printed
from one_rank import fresh
from short_runs import TINY, assert_same_run, ended, prepare, train

from mpipar.errors import DataError
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.manifest import committed_steps
from mpipar.run.compared import digest_of_weights
from mpipar.run.files.settings import to_toml
from mpipar.run.folder import SOURCES, Sources, folder_problems
from mpipar.run.resolve import resolve
from mpipar.run.resume import check_begin, find_start

SHAPE = {
    "layers": 2,
    "d_model": 8,
    "heads": 2,
    "ffn": 12,
    "seq_len": 5,
    "vocab_size": 256,
    "dtype": "float32",
}
OF_MODEL = """--data text.txt --batch-size 4 --num-microbatches 2 --sample-tokens 4 --steps 10
    --warmup-steps 2 --log-interval 4""".split()
AUTO = ("--resume", "auto", "--out", "run")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to start in: a text, two models, and a run that has ended before it has saved."""
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, seed in (("m", 1), ("other", 2)):
        checkpoint.save(fresh(**SHAPE, seed=seed), tmp_path / name)
    began("run", "--init-from", "m", "--lr", "0.5", "--seed", "3")
    return tmp_path


def began(folder, *words):
    """Write what a first start writes; it has no checkpoint yet."""
    path = Path(folder)
    path.mkdir()
    config, _ = resolve(reading_of(*OF_MODEL, *words, "--out", folder), 1)
    source = config.run.init_from or ""
    sources = Sources(source, source and digest_of_weights(source), "", {"length": 9})
    (path / "config.toml").write_text(to_toml(config))
    (path / SOURCES).write_text(json.dumps(vars(sources)))


def start(*words):
    """Where a run with these flags begins."""
    return find_start(reading_of(*words).config.run)


@pytest.mark.parametrize("words", [(), ("--init-from", "m"), ("--init-from", "copy")])
def test_a_start_without_a_checkpoint_takes_all_of_the_first_one(words, here):
    shutil.copytree("m", "copy")
    text = printed("train", *AUTO, *words, "--print-config")
    source = words[1] if words else "m"
    for line in (
        f'init-from = "{source}"',
        "lr = 0.5",
        "seed = 3",
        'data = ["text.txt"]',
        "d-model = 8",
        "batch-size = 4",
    ):
        assert f"\n{line}\n" in text
    assert "from the weights of" in start(*AUTO, *words).notes[0]


def test_what_the_first_start_fixed_is_not_changed(here):
    assert_refused(
        2,
        ["--lr 0.1: can't change", "--seed 4", "which has 3"],
        "train",
        *AUTO,
        "--lr",
        "0.1",
        "--seed",
        "4",
    )


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (
            ("--init-from", "other"),
            2,
            ["--init-from other: is not what the run in run", "leave --init-from out"],
        ),
        (("--init-from", "nowhere"), 65, ["--init-from nowhere: there is no such folder"]),
    ],
)
def test_other_first_weights_are_refused(words, code, parts, here):
    assert_refused(code, parts, "train", *AUTO, *words)


def test_first_weights_that_no_longer_are_what_they_were(here):
    flip(here / "m" / "model.safetensors")
    assert_refused(2, ["is not what the run"], "train", *AUTO, "--init-from", "m")
    found = start(*AUTO)
    assert found.weights == "m"
    with pytest.raises(DataError, match="--init-from m: has changed since the run started"):
        check_begin(found, {"length": 9}, digest_of_weights("m"))
    with pytest.raises(DataError, match="--data: has changed since the run started: length 8 now"):
        check_begin(found, {"length": 8}, found.digest)
    shutil.rmtree("m")
    assert_refused(65, ["--init-from m: there is no such folder"], "train", *AUTO)


def test_a_run_that_began_without_weights_takes_none_later(here):
    began("plain", "--layers", "1")
    plain = ("--resume", "auto", "--out", "plain")
    assert "init-from" not in printed("train", *plain, "--print-config")
    assert_refused(
        2, ["the run in plain did not start from it"], "train", *plain, "--init-from", "m"
    )


@pytest.mark.parametrize("content", ["", "[]", '{"init_from": 1}', "{" * 100])
def test_damaged_sources_are_refused(content, here):
    (here / "run" / SOURCES).write_text(content)
    assert_refused(65, ["sources.json", "give a new --out"], "train", *AUTO)


def test_a_start_that_ended_before_it_wrote_its_settings_leaves_the_folder_free(here):
    config, _ = resolve(reading_of(*TINY, "--out", "run"), 1)
    assert folder_problems(config)
    (here / "run" / "config.toml").rename(here / "run" / "config.toml.partial")
    assert not folder_problems(config)


@pytest.mark.slow
def test_one_command_line_for_the_first_start_and_all_later_ones(here):
    shutil.rmtree("run")
    train(here, *OF_MODEL, "--init-from", "m", "--out", "whole")
    result = ended(here, "kill", 4, *OF_MODEL, "--init-from", "m", *AUTO)
    assert result.returncode, result.tail()
    assert not committed_steps(here / "run" / "checkpoints")
    result = ended(here, "kill", 8, "--save-interval", 6, *AUTO)  # nothing is named again
    assert result.returncode, result.tail()
    text = train(here, *OF_MODEL, "--init-from", "m", *AUTO)
    assert "resumed after step 6" in text
    assert_same_run(here / "whole", here / "run")
    assert "nothing is left to do" in train(here, *OF_MODEL, "--init-from", "m", *AUTO)


def test_a_branch_that_ended_before_its_first_checkpoint_is_refused(here):
    sources = Sources(resumed="first/checkpoints/step-00000005")
    (here / "run" / SOURCES).write_text(json.dumps(vars(sources)))
    assert_refused(2, [f"give a new --out, and --resume {sources.resumed} again"], "train", *AUTO)
