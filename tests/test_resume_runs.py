"""Runs that are killed or stopped, and resumed: they end as one that was never interrupted."""

import contextlib
import functools
import json
import shutil

import numpy as np
import pytest
from damage import flip
from fault_table import fault
from helpers import run_command, run_ranks
from in_process import alone
from program import FAULTY, LETTERS, LIMIT, block_of, environment, killed_by, metrics, mpipar

from mpipar.run.checkpoint.manifest import committed_steps, read_manifest
from mpipar.run.folder import newest_step

TINY = """--data text.txt --layers 2 --d-model 8 --heads 2 --ffn 12 --seq-len 5 --batch-size 4
    --num-microbatches 2 --sample-tokens 4 --steps 10 --warmup-steps 2 --log-interval 4""".split()
# float16 whose scale overflows at first
FLOAT16 = "--dtype float16 --loss-scale 1048576".split()
TIMES = {"step_seconds", "tokens_per_second", "comm_share_mean", "comm_share_max"}


@pytest.fixture
def here(tmp_path):
    """A folder to start in, with a text in it."""
    prepare(tmp_path)
    return tmp_path


def prepare(folder):
    """Write the text."""
    (folder / "text.txt").write_text(LETTERS)


def train(here, *words, ranks=None, code=0):
    """Train in a folder; return what was printed. The run must end with this code."""
    start = functools.partial(mpipar, ranks=ranks) if ranks else alone
    result = start("train", *words, cwd=here).ended(code)
    return result.stdout + result.stderr


def ended(here, how, number, *words, ranks=None):
    """A run that faulty_run.py ends too early."""
    argv = [*FAULTY, f"{how}@{number}", "train", *map(str, words)]
    if ranks is None:
        return run_command(argv, LIMIT, environment(), here)
    return run_ranks(ranks, argv, LIMIT, environment(), here)


def without_times(folder):
    """The lines of metrics.jsonl, without what a clock has measured."""
    return [
        {
            name: (
                {
                    axis: {"calls": one["calls"], "bytes": one["bytes"]}
                    for axis, one in value.items()
                }
                if name == "comm"
                else value
            )
            for name, value in line.items()
            if name not in TIMES
        }
        for line in metrics(folder)
    ]


def state(folder, step):
    """{file: digest} and the loss scale of a checkpoint."""
    manifest = read_manifest(folder / "checkpoints" / f"step-{step:08d}")
    return manifest.files, manifest.loss_scale


def assert_same_run(one, other, step=10):
    """Assert that two runs have the same metrics, weights and last state, bit by bit."""
    assert without_times(one) == without_times(other)
    assert [line["step"] for line in metrics(one)] == list(range(1, step + 1))
    name = "weights/model.safetensors"
    assert (one / name).read_bytes() == (other / name).read_bytes()
    assert state(one, step) == state(other, step)
    assert (one / "result.json").read_text() == (other / "result.json").read_text()


# --- kill -9, then go on


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([*TINY], id="float32", marks=pytest.mark.slow),
        pytest.param([*TINY, *FLOAT16], id="float16"),
        pytest.param([*TINY, "--dtype", "bfloat16"], id="bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_been(words, here):
    train(here, *words, "--out", "whole")
    result = ended(here, "kill", 7, *words, "--out", "killed", "--save-interval", "4")
    killed_by(result, 9)
    assert newest_step(here / "killed") == 4
    text = train(here, "--resume", "auto", "--out", "killed")
    assert "resumed after step 4" in text
    assert "took over the lock" in text
    assert "as before" in text
    assert_same_run(here / "whole", here / "killed")
    if words[-1] == "3":
        assert {line["skipped"] for line in metrics(here / "whole")} == {False, True}
    # The run has ended: a further start does nothing. More steps go on from its end.
    text = train(here, "--resume", "auto", "--out", "killed")
    assert "this run ended with step 10" in text


@pytest.mark.slow
def test_experts_of_a_killed_run_go_on_elsewhere(here):
    """Their weights and state lie on four ranks, and are put together for a layout without ep."""
    words = [
        *TINY,
        "--dtype",
        "float64",
        "--experts",
        "4",
        "--experts-per-token",
        "2",
        "--router-balance",
        "bias",
    ]
    train(here, *words, "--out", "whole")
    result = ended(
        here,
        "kill",
        7,
        *words,
        "--num-microbatches",
        "1",
        "--layout",
        "dp=4,ep=4",
        "--zero",
        "3",
        "--save-interval",
        "4",
        "--out",
        "killed",
        ranks=4,
    )
    killed_by(result, 9)
    elsewhere = ["--layout", "tp=2,pp=2", "--zero", "0"]
    text = train(here, "--resume", "auto", "--out", "killed", *elsewhere, ranks=4)
    assert "resumed after step 4" in text
    pairs = [[line["loss"] for line in metrics(here / name)] for name in ("whole", "killed")]
    np.testing.assert_allclose(*pairs, rtol=1e-12)
    assert len(pairs[0]) == 10


@pytest.mark.slow
def test_two_ranks_killed_twice(here):
    words = [*TINY, "--pp", "2", "--schedule", "gpipe"]
    train(here, *words, "--out", "whole", ranks=2)
    for at, form in ((5, "--no-save-async"), (9, "--save-async")):
        resume = ["--resume", "auto", form, "--save-interval", "2", "--out", "killed"]
        killed_by(ended(here, "kill", at, *words, *resume, ranks=2), 9)
    assert newest_step(here / "killed") >= 6
    train(here, *words, "--resume", "auto", "--out", "killed", ranks=2)
    assert_same_run(here / "whole", here / "killed")


def test_a_stop_saves_and_the_run_goes_on(here):
    train(here, *TINY, "--out", "whole")
    result = ended(here, "stop", 7, *TINY, "--out", "stopped").ended(75)
    step = newest_step(here / "stopped")
    assert step >= 7
    assert f"stopped on request after step {step}" in result.stdout
    assert (here / "stopped" / "weights" / "model.safetensors").exists()
    train(here, "--resume", "auto", "--out", "stopped")
    assert_same_run(here / "whole", here / "stopped")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number", "lines", "said"),
    [
        ("kill", 6, 4, "no checkpoint: the run starts at step 1"),  # before the first save
        ("evaluate", 0, 10, "held-out loss"),
    ],
)  # only that is left
def test_killed_without_an_interval_of_saves(how, number, lines, said, here):
    train(here, *TINY, "--out", "whole")
    killed_by(ended(here, how, number, *TINY, "--out", "killed"), 9)
    assert len(metrics(here / "killed")) == lines
    text = train(here, *TINY, "--resume", "auto", "--out", "killed")
    assert said in text
    assert ("step 10/10" in text) == (lines < 10)
    assert_same_run(here / "whole", here / "killed")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder with a whole run in float16, and one that was killed."""
    folder = tmp_path_factory.mktemp("killed")
    prepare(folder)
    train(folder, *TINY, *FLOAT16, "--out", "whole")
    ended(
        folder,
        "kill",
        8,
        *TINY,
        *FLOAT16,
        "--out",
        "killed",
        "--save-interval",
        "4",
        "--log-interval",
        "1",
    )
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
    here = tmp_path / "here"
    shutil.copytree(killed, here)
    ended(here, twin, 0, "--resume", "auto", "--out", "killed").ended()
    with contextlib.nullcontext() if twin == "nothing" else pytest.raises(AssertionError):
        assert_same_run(here / "whole", here / "killed")


# --- damage, and disks that are full


@pytest.mark.slow
def test_damage_on_one_rank_makes_all_fall_back(here):
    """Only rank 1 reads the damaged file."""
    train(here, *TINY, "--pp", "2", "--save-interval", "5", "--out", "run", ranks=2)
    shutil.copytree(here / "run", here / "whole")
    newest = here / "run" / "checkpoints" / "step-00000010"
    flip(newest / "pieces-00001.safetensors")
    (here / "run" / "result.json").unlink()
    text = train(here, "--resume", "run", ranks=2, code=65)
    assert "pieces-00001.safetensors: is damaged" in text
    assert "tensor " in text
    text = train(here, "--resume", "auto", "--out", "run", ranks=2)
    assert "DAMAGED CHECKPOINT, falling back" in text
    assert "resumed after step 5" in text
    assert (newest.parent / "step-00000010.aside-1").is_dir()
    assert_same_run(here / "whole", here / "run")


def test_no_checkpoint_is_whole(here):
    train(here, *TINY, "--save-interval", "5", "--out", "run")
    (here / "run" / "result.json").unlink()
    for _, path in committed_steps(here / "run" / "checkpoints"):
        (path / "manifest.json").write_text("{")
    text = train(here, "--resume", "auto", "--out", "run", code=65)
    assert text.count("manifest.json") == 2
    assert len(metrics(here / "run")) == 10


@fault(22, "no space at an interval: a warning, and the run continues", 0)
def test_no_space_at_an_interval_is_a_warning(here):
    result = ended(here, "no-space", 2, *TINY, "--save-interval", "3", "--out", "run").ended()
    assert result.stdout.count("WARNING") == 1
    assert "step-00000006: the checkpoint could not be written: rank 0: No space" in result.stdout
    assert [step for step, _ in committed_steps(here / "run" / "checkpoints")] == [9, 10]
    assert len(list((here / "run" / "checkpoints").iterdir())) == 2


@fault(22, "no space at the last save", 74)
def test_no_space_at_the_end_keeps_the_former_checkpoint(here):
    result = ended(here, "full", 3, *TINY, "--save-interval", "3", "--out", "run")
    block_of(result, 74, "No space left on device")
    assert [path.name for path in sorted((here / "run" / "checkpoints").iterdir())] == [
        "step-00000003",
        "step-00000006",
    ]
    train(here, "--resume", "auto", "--out", "run")
    assert json.loads((here / "run" / "result.json").read_text())["step"] == 10
