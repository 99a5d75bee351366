"""Runs that are killed or stopped, and resumed: they end as one that was never interrupted."""

import contextlib
import json
import shutil

import pytest
from damage import flip
from fault_table import fault
from program import block_of, killed_by, metrics
from short_runs import (  # noqa: F401
    OFTEN,
    TINY,
    assert_same_run,
    ended,
    evaluations,
    prepare,
    state,
    train,
)

from mpipar.run.checkpoint.manifest import committed_steps
from mpipar.run.folder import newest_step

# float16 whose scale overflows at first
FLOAT16 = "--dtype float16 --loss-scale 1048576".split()


# --- kill -9, then go on


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([*TINY], id="float32", marks=pytest.mark.slow),
        pytest.param([*TINY, *FLOAT16], id="float16"),
        pytest.param([*TINY, "--dtype", "bfloat16"], id="bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_been(words, text_folder):
    train(text_folder, *words, "--out", "whole")
    result = ended(text_folder, "kill", 7, *words, "--out", "killed", "--save-interval", "4")
    killed_by(result, 9)
    assert newest_step(text_folder / "killed") == 4
    text = train(text_folder, "--resume", "auto", "--out", "killed")
    assert "resumed after step 4" in text
    assert "took over the lock" in text
    assert "as before" in text
    assert_same_run(text_folder / "whole", text_folder / "killed")
    if words[-1] == "3":
        assert {line["skipped"] for line in metrics(text_folder / "whole")} == {False, True}
    # The run has ended: a further start does nothing. More steps go on from its end.
    text = train(text_folder, "--resume", "auto", "--out", "killed")
    assert "this run ended with step 10" in text


@pytest.mark.slow
def test_two_ranks_killed_twice(text_folder):
    words = [*TINY, *OFTEN, "--pp", "2", "--schedule", "gpipe"]
    train(text_folder, *words, "--out", "whole", ranks=2)
    for at, form in ((5, "--no-save-async"), (9, "--save-async")):
        resume = ["--resume", "auto", form, "--save-interval", "2", "--out", "killed"]
        killed_by(ended(text_folder, "kill", at, *words, *resume, ranks=2), 9)
    assert newest_step(text_folder / "killed") >= 6
    train(text_folder, *words, "--resume", "auto", "--out", "killed", ranks=2)
    assert_same_run(text_folder / "whole", text_folder / "killed")
    assert evaluations(text_folder / "killed") == evaluations(text_folder / "whole")


def test_a_stop_saves_and_the_run_goes_on(text_folder):
    train(text_folder, *TINY, "--out", "whole")
    result = ended(text_folder, "stop", 7, *TINY, "--out", "stopped").ended(75)
    step = newest_step(text_folder / "stopped")
    assert step >= 7
    assert f"stopped on request after step {step}" in result.stdout
    assert (text_folder / "stopped" / "weights" / "model.safetensors").exists()
    train(text_folder, "--resume", "auto", "--out", "stopped")
    assert_same_run(text_folder / "whole", text_folder / "stopped")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number", "lines", "said"),
    [
        ("kill", 6, 4, "no checkpoint: the run starts at step 1"),  # before the first save
        ("evaluate", 0, 10, "held-out loss"),
    ],
)  # only that is left
def test_killed_without_an_interval_of_saves(how, number, lines, said, text_folder):
    train(text_folder, *TINY, "--out", "whole")
    killed_by(ended(text_folder, how, number, *TINY, "--out", "killed"), 9)
    assert len(metrics(text_folder / "killed")) == lines
    text = train(text_folder, *TINY, "--resume", "auto", "--out", "killed")
    assert said in text
    assert ("step 10/10" in text) == (lines < 10)
    assert_same_run(text_folder / "whole", text_folder / "killed")


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
    text_folder = tmp_path / "here"
    shutil.copytree(killed, text_folder)
    ended(text_folder, twin, 0, "--resume", "auto", "--out", "killed").ended()
    with contextlib.nullcontext() if twin == "nothing" else pytest.raises(AssertionError):
        assert_same_run(text_folder / "whole", text_folder / "killed")


# --- damage, and disks that are full


@pytest.mark.slow
def test_damage_on_one_rank_makes_all_fall_back(text_folder):
    """Only rank 1 reads the damaged file."""
    train(text_folder, *TINY, "--pp", "2", "--save-interval", "5", "--out", "run", ranks=2)
    shutil.copytree(text_folder / "run", text_folder / "whole")
    newest = text_folder / "run" / "checkpoints" / "step-00000010"
    flip(newest / "pieces-00001.safetensors")
    (text_folder / "run" / "result.json").unlink()
    text = train(text_folder, "--resume", "run", ranks=2, code=65)
    assert "pieces-00001.safetensors: is damaged" in text
    assert "tensor " in text
    text = train(text_folder, "--resume", "auto", "--out", "run", ranks=2)
    assert "DAMAGED CHECKPOINT, falling back" in text
    assert "resumed after step 5" in text
    assert (newest.parent / "step-00000010.aside-1").is_dir()
    assert_same_run(text_folder / "whole", text_folder / "run")


def test_no_checkpoint_is_whole(text_folder):
    train(text_folder, *TINY, "--save-interval", "5", "--out", "run")
    (text_folder / "run" / "result.json").unlink()
    for _, path in committed_steps(text_folder / "run" / "checkpoints"):
        (path / "manifest.json").write_text("{")
    text = train(text_folder, "--resume", "auto", "--out", "run", code=65)
    assert text.count("manifest.json") == 2
    assert len(metrics(text_folder / "run")) == 10


@fault(22, "no space at an interval: a warning, and the run continues", 0)
def test_no_space_at_an_interval_is_a_warning(text_folder):
    result = ended(
        text_folder, "no-space", 2, *TINY, "--save-interval", "3", "--out", "run"
    ).ended()
    assert result.stdout.count("WARNING") == 1
    assert "step-00000006: the checkpoint could not be written: rank 0: No space" in result.stdout
    assert [step for step, _ in committed_steps(text_folder / "run" / "checkpoints")] == [9, 10]
    assert len(list((text_folder / "run" / "checkpoints").iterdir())) == 2


@fault(22, "no space at the last save", 74)
def test_no_space_at_the_end_keeps_the_former_checkpoint(text_folder):
    result = ended(text_folder, "full", 3, *TINY, "--save-interval", "3", "--out", "run")
    block_of(result, 74, "No space left on device")
    assert [path.name for path in sorted((text_folder / "run" / "checkpoints").iterdir())] == [
        "step-00000003",
        "step-00000006",
    ]
    train(text_folder, "--resume", "auto", "--out", "run")
    assert json.loads((text_folder / "run" / "result.json").read_text())["step"] == 10
