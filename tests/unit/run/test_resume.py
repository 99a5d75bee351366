"""Where a run resumes, with which settings, and what is refused; `mpipar ckpt`.

Runs that are killed and resumed are in test_run_ends.py, files of a checkpoint in test_state.py.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from config_helpers import reading_of
from in_process import alone, assert_refused, printed
from one_rank import fresh
from program import LETTERS, flip, metrics
from short_runs import TINY as TEN_STEPS
from short_runs import assert_same_run, ended, prepare, train

from mpipar.errors import DataError, UsageError
from mpipar.run import resume
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.manifest import committed_steps, read_manifest
from mpipar.run.files.settings import to_toml, values_of
from mpipar.run.folder import SOURCES, Sources, folder_problems, open_run_folder
from mpipar.run.resolve import digest_of_weights, resolve
from mpipar.run.resume import Start, check_begin, find_start, load_newest, resumed

TINY = """--data text.txt --layers 2 --d-model 8 --heads 2 --ffn 12 --seq-len 5 --batch-size 4
    --num-microbatches 2 --sample-tokens 0 --steps 6 --save-interval 2 --keep-checkpoints 0
    --dtype float64""".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run that has ended, and its data."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text(LETTERS)
    alone("train", *TINY, "--out", "run", cwd=folder).ended()
    return folder


@pytest.fixture
def here(made, tmp_path):
    """A copy of it."""
    shutil.copytree(made, tmp_path / "here")
    return tmp_path / "here"


# --- what is refused, and what is typed instead


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        ("--out run", 2, ["run exists and is not empty", "--resume auto --out run"]),
        ("--resume auto --out run --steps 5", 2, ["--steps 5", "step 6"]),
        ("--resume nowhere", 65, ["--resume nowhere: there is no checkpoint here"]),
        ("--resume run/checkpoints/step-00000009", 65, ["step-00000009"]),
        ("--resume run --out text.txt", 2, ["text.txt: Not a directory"]),
        (
            "--resume run/checkpoints/step-00000002 --steps 9 --data other.txt",
            65,
            ["--data: has changed", "length 930, dtype uint8, sha256", "length 1200, dtype uint8"],
        ),
        ("--resume run --steps 9 --dp 3", 2, ["--dp 3", "mpiexec -n 3"]),
        ("--resume auto --out run --init-from x", 65, ["--init-from x: there is no such folder"]),
        (
            "--resume auto --out run --init-from run",
            2,
            ["--init-from run: the run in run started from new weights", "leave --init-from out"],
        ),
    ],
)
def test_refusals(words, code, parts, here):
    (here / "other.txt").write_text("another text" * 100)
    assert_refused(code, parts, "train", *words.split(), folder=here)


FIXED = {
    "batch-size": ("8", "4"),
    "optimizer": ("sgd", "adamw"),
    "dtype": ("float32", "float64"),
    "layers": ("3", "2"),
    "vocab-size": ("300", "256"),
}


def test_what_cannot_change_is_refused_at_once_with_both_values(here):
    words = [word for name, (value, _) in FIXED.items() for word in (f"--{name}", value)]
    parts = [
        f"--{name} {value}: can't change in a resumed run, which has {saved}"
        for name, (value, saved) in FIXED.items()
    ]
    assert_refused(2, parts, "train", "--resume", "run", "--out", "new", *words, folder=here)


# --- settings


def saved_settings(*words, ranks=4):
    """The settings of a run as its checkpoint has them."""
    config, _ = resolve(reading_of(*words), ranks)
    return values_of(to_toml(config))


def settled(saved, *words, ranks=4):
    """Return the complete settings of a resumed run."""
    config, _ = resolve(resumed(reading_of(*words), saved, ranks), ranks)
    return config


def test_settings_come_from_the_checkpoint_unless_they_are_given():
    saved = saved_settings(
        *"--lr 0.5 --pp 2 --tp 2 --schedule gpipe --out a --trace 1 --log-interval 7".split(),
        "--no-tied",
    )
    config = settled(saved, "--log-interval", "3")
    assert (config.train.lr, config.model.tied) == (0.5, False)
    assert (config.grid.dp, config.grid.pp, config.grid.tp) == (1, 2, 2)
    assert (config.grid.schedule, config.run.log_interval) == ("gpipe", 3)
    assert (config.run.out, config.run.trace, config.run.resume) == (None, None, "never")


@pytest.mark.parametrize(
    ("words", "ranks", "layout"),
    [
        (["--dp", "4"], 4, (4, 1, 1)),
        (["--layout", "tp=2"], 2, (1, 1, 2)),
    ],
)
def test_what_depends_on_the_layout_is_chosen_anew_with_one_that_is_given(words, ranks, layout):
    saved = saved_settings(
        *"--pp 4 --schedule interleaved --chunks 1 --stage-layers 1,1,1,1".split(),
        *"--num-microbatches 4".split(),
    )
    grid = settled(saved, *words, "--schedule", "1f1b", ranks=ranks).grid
    assert (grid.dp, grid.pp, grid.tp) == layout
    assert (grid.stage_layers, grid.chunks) == (None, None)


def test_another_number_of_ranks_needs_a_layout():
    saved = saved_settings("--dp", "2", "--tp", "2")
    with pytest.raises(UsageError) as caught:
        settled(saved, ranks=2)
    assert "2 ranks: the run has 4; start mpiexec -n 4, or add a --layout" in str(caught.value)
    assert "--dp" not in str(caught.value)
    assert settled(saved, "--layout", "tp=2", ranks=2).train.batch_size == saved["batch_size"]


# What a run saved before some settings became constants: every one with the value of its default.
EARLIER = """model = "decoder"
blas-arch = "SkylakeX"
run-name = "mine"
progress = "plain"
max-shard-size = 5368709120
sync-sends = false
trace-ops = false
memory = false
prompt = "The "
sample-interval = 0
temperature = 0.8
top-k = 50
top-p = 1.0
stop-token = []
zero-grads = "full"
decay-ratio = 0.2
routing = "learned"
router-bias-rate = 0.001
"""


def as_earlier(run, text):
    """Add these lines to the configuration of a run and of its checkpoints."""
    with (run / "config.toml").open("a") as file:
        file.write(text)
    for step in (run / "checkpoints").iterdir():
        found = read_manifest(step)
        found = replace(found, config=found.config + text)
        (step / "manifest.json").write_text(found.text())


def test_a_run_with_settings_that_are_gone_resumes(here):
    as_earlier(here / "run", EARLIER)
    words = ("--resume", "run", "--steps", "8", "--trace", "1:2")
    text = alone("train", *words, cwd=here).ended().stdout
    assert "--trace 1:2: the run resumes after step 6: nothing is traced" in text
    for line in EARLIER.splitlines():
        note = f"{line.split()[0]} is no longer a setting, and left out"
        assert text.count(f"the run's config.toml: {note}\n") == 1
    assert "resumed after step 6" in text
    assert "stop-token" not in (here / "run" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("temperature = 1.5", "mpipar generate takes it"),
        ("model = 'convnet'", "every model is a decoder"),
    ],
)
def test_a_run_whose_settings_are_no_longer_possible_is_refused(here, line, instead):
    as_earlier(here / "run", line + "\n")
    parts = [f"{line} is no longer possible", instead, "--init-from"]
    assert_refused(65, parts, "train", "--resume", "run", "--steps", "8", folder=here)


# --- mpipar ckpt


def test_ckpt_ls(here):
    (here / "run" / "checkpoints" / "step-00000004" / "pieces-00000.safetensors").unlink()
    rows = [line.split() for line in printed("ckpt", "ls", here / "run").splitlines()]
    assert [row[0] for row in rows[1:]] == ["2", "4", "6"]
    assert [("complete" in row, "DAMAGED:" in row) for row in rows[1:]] == [
        (True, False),
        (False, True),
        (True, False),
    ]


def test_ckpt_verify(here):
    """Without checkpoints, as when they were deleted to save space, the final weights alone."""
    checkpoints = here / "run" / "checkpoints"
    assert printed("ckpt", "verify", here / "run").count("every byte") == 4
    flip(checkpoints / "step-00000004" / "pieces-00000.safetensors", 1)
    text = printed("ckpt", "verify", here / "run", code=65)
    assert text.count("every byte") == 3
    assert "pieces-00000.safetensors: is damaged" in text
    assert printed("ckpt", "verify", here / "run", "--step", "6").count("every byte") == 1
    shutil.rmtree(checkpoints)
    flip(here / "run" / "weights" / "model.safetensors", 1)
    assert "model.safetensors: is damaged" in printed("ckpt", "verify", here / "run", code=65)
    shutil.rmtree(here / "run" / "weights")
    parts = ["run: has no checkpoint, and no weights with digests"]
    assert_refused(65, parts, "ckpt", "verify", "run", folder=here)


def test_ckpt_export_of_an_earlier_step(here):
    out = here / "exported"
    printed("ckpt", "export", here / "run", "--step", "2", "--out", out)
    config, weights = (
        [(folder / name).read_bytes() for folder in (out, here / "run" / "weights")]
        for name in ("config.json", "model.safetensors")
    )
    assert config[0] == config[1]
    assert weights[0] != weights[1]


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        ("ls text.txt", 65, ["not a run folder"]),
        ("verify nowhere", 65, ["not a run folder"]),
        ("export run", 2, ["run/weights: exists and is not empty", "--out"]),
        (
            "export run --step 3",
            65,
            ["has no such checkpoint; steps of those that it has: 2, 4, 6"],
        ),
        ("ls run --step 3", 2, ["--step: ls does not use it"]),
        ("verify run --out x", 2, ["--out: verify does not use it"]),
        ("look run", 2, ["look", "ls|verify|export"]),
    ],
)
def test_ckpt_refusals(words, code, parts, here):
    assert_refused(code, parts, "ckpt", *words.split(), folder=here)


def test_a_damaged_checkpoint_is_not_exported(here):
    path = here / "run" / "checkpoints" / "step-00000006" / "pieces-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert_refused(
        65, ["pieces-00000.safetensors"], "ckpt", "export", "run", "--out", "x", folder=here
    )
    assert not (here / "x").exists()


def test_going_back_to_an_earlier_step_keeps_the_later_ones_aside(here):
    (here / "run" / "result.json").unlink()
    before = (here / "run" / "metrics.jsonl").read_text()
    alone(
        "train", "--resume", "run/checkpoints/step-00000002", "--save-interval", "3", cwd=here
    ).ended()
    names = sorted(path.name for path in (here / "run" / "checkpoints").iterdir())
    assert names == [
        "step-00000002",
        "step-00000003",
        "step-00000004.aside-1",
        "step-00000006",
        "step-00000006.aside-1",
    ]
    assert [line["loss"] for line in metrics(here / "run")] == [
        json.loads(line)["loss"] for line in before.splitlines()
    ]


# --- a run's initial weights: later starts in its folder use them, or refuse if they differ


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
def unsaved(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("words", [(), ("--init-from", "m")])
def test_a_start_without_a_checkpoint_takes_all_of_the_first_one(words, unsaved):
    text = printed("train", *AUTO, *words, "--print-config")
    for line in ('init-from = "m"', "lr = 0.5", "seed = 3", 'data = ["text.txt"]', "d-model = 8"):
        assert f"\n{line}\n" in text


def test_what_the_first_start_fixed_is_not_changed(unsaved):
    assert_refused(2, ["--seed 4: can't change", "which has 3"], "train", *AUTO, "--seed", "4")
    parts = ["--init-from other: the run in run started from m; leave --init-from out"]
    assert_refused(2, parts, "train", *AUTO, "--init-from", "other")


def test_first_weights_that_no_longer_are_what_they_were(unsaved):
    flip(unsaved / "m" / "model.safetensors")
    found = start(*AUTO)
    assert found.weights == "m"
    with pytest.raises(DataError, match="--init-from m: has changed since the run started"):
        check_begin(found, {"length": 9}, digest_of_weights("m"))
    with pytest.raises(DataError, match="--data: has changed since the run started: length 8 now"):
        check_begin(found, {"length": 8}, found.digest)
    shutil.rmtree("m")
    assert_refused(65, ["--init-from m: there is no such folder"], "train", *AUTO)


def test_first_weights_are_compared_where_a_checkpoint_exists_too(unsaved):
    (unsaved / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    flip(unsaved / "m" / "model.safetensors")
    with pytest.raises(UsageError, match="--init-from m: has changed since the run in run started"):
        start(*AUTO, "--init-from", "m")


@pytest.mark.parametrize("content", ["", '{"init_from": 1}'])
def test_damaged_sources_are_refused(content, unsaved):
    (unsaved / "run" / SOURCES).write_text(content)
    assert_refused(65, ["sources.json", "give a new --out"], "train", *AUTO)


def test_a_start_that_ended_before_it_wrote_its_settings_leaves_the_folder_free(unsaved):
    config, _ = resolve(reading_of(*TEN_STEPS, "--out", "run"), 1)
    assert folder_problems(config)
    (unsaved / "run" / "config.toml").rename(unsaved / "run" / "config.toml.partial")
    assert not folder_problems(config)


def test_only_a_run_is_said_to_be_one_that_resumes(unsaved):
    config, _ = resolve(reading_of(*TEN_STEPS, "--out", "m"), 1)
    assert folder_problems(config)[0].endswith("never overwrites another: give a new --out")


def test_a_run_that_another_job_has_continued_meanwhile_is_left_alone(here, monkeypatch):
    monkeypatch.chdir(here)
    shutil.move("run/checkpoints/step-00000006", "later")
    found = start(*AUTO)
    shutil.move("later", "run/checkpoints/step-00000006")
    session = SimpleNamespace(lock=lambda folder: None)
    with pytest.raises(UsageError, match="another job has just resumed in it; start again"):
        open_run_folder(found, None, session, Sources(), {})


def test_a_checkpoint_that_differs_between_ranks_is_not_loaded(here, monkeypatch):
    found = Start(candidates=(str(here / "run" / "checkpoints" / "step-00000006"),))
    monkeypatch.setattr(resume, "load_state", lambda *arguments: None)
    monkeypatch.setattr(resume, "all_gather_objects", lambda world, own: [own, [[], "another"]])
    session = SimpleNamespace(world=None, agree=lambda check: check())
    with pytest.raises(DataError, match="step-00000006: differs between ranks"):
        load_newest(session, None, found, print)


@pytest.mark.slow
def test_one_command_line_for_the_first_start_and_all_later_ones(unsaved):
    shutil.rmtree("run")
    train(unsaved, *OF_MODEL, "--init-from", "m", "--out", "whole")
    result = ended(unsaved, "kill", 4, *OF_MODEL, "--init-from", "m", *AUTO)
    assert result.returncode, result.tail()
    assert not committed_steps(unsaved / "run" / "checkpoints")
    result = ended(unsaved, "kill", 8, "--save-interval", 6, *AUTO)  # nothing is named again
    assert result.returncode, result.tail()
    text = train(unsaved, *OF_MODEL, "--init-from", "m", *AUTO)
    assert "resumed after step 6" in text
    assert_same_run(unsaved / "whole", unsaved / "run")
    assert "nothing is left to do" in train(unsaved, *OF_MODEL, "--init-from", "m", *AUTO)


def test_a_branch_that_ended_before_its_first_checkpoint_is_refused(unsaved):
    sources = Sources(resumed="first/checkpoints/step-00000005")
    (unsaved / "run" / SOURCES).write_text(json.dumps(vars(sources)))
    assert_refused(2, [f"give a new --out, and --resume {sources.resumed} again"], "train", *AUTO)
