"""Event files for TensorBoard: read back by TensorBoard itself, also after a run was resumed."""

import importlib.util

import pytest
from in_process import assert_refused
from program import metrics, mpipar
from short_runs import TINY, ended, train

from mpipar.run.console.tensorboard import TAGS, Events

WORDS = [*TINY, "--eval-interval", "4", "--eval-tokens", "40", "--tensorboard"]
needs_package = pytest.mark.tensorboard


def curves(folder):
    """{tag: {step: value}}, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {
        tag: {one.step: one.value for one in found.Scalars(tag)} for tag in found.Tags()["scalars"]
    }


@needs_package
def test_a_run_that_goes_on_has_each_step_once(text_folder):
    train(text_folder, *WORDS, "--out", "whole")
    ended(text_folder, "stop", 4, *WORDS, "--out", "run").ended(75)  # a step with an evaluation
    # a process of its own: within a second the number of the process orders the files
    mpipar("train", "--resume", "auto", "--out", "run", cwd=text_folder).ended()
    assert len(list((text_folder / "run" / "tensorboard").iterdir())) == 2
    found, whole = (curves(text_folder / name) for name in ("run", "whole"))
    assert set(found) == set(TAGS.values()) - {"loss_scale"}
    for tag in ("loss/training", "loss/held_out", "learning_rate", "gradient_norm"):
        assert found[tag] == whole[tag]
    assert list(found["loss/training"]) == list(range(1, 11))
    assert list(found["loss/held_out"]) == [4, 8, 10]
    for line in metrics(text_folder / "run"):
        assert found["loss/training"][line["step"]] == pytest.approx(line["loss"], rel=1e-6)


@needs_package
def test_steps_that_are_taken_again_are_dropped(tmp_path):
    for first, last, loss in ((1, 8, 1.0), (5, 10, 2.0)):  # killed after 8, saved at 4
        events = Events(tmp_path, first)
        for step in range(first, last + 1):
            events.add({"step": step, "loss": loss, "grad_norm": None})
        events.sync()
        events.close()
    assert curves(tmp_path) == {
        "loss/training": {step: 1.0 if step < 5 else 2.0 for step in range(1, 11)}
    }


@needs_package
def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file is in the way")
    events = Events(tmp_path, 1)
    for step in (1, 2):
        events.add({"step": step, "loss": 1.0})
    events.sync()
    events.close()
    assert capsys.readouterr().err.count("no more event files for TensorBoard") == 1


def test_without_the_package_the_run_does_not_begin(tmp_path, monkeypatch):
    plain = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else plain(name)
    )
    assert_refused(
        69,
        [
            "--tensorboard: the package tensorboard is not installed",
            "pip install '.[tensorboard]'",
            "metrics.csv has the same numbers",
        ],
        "train",
        "--tensorboard",
        folder=tmp_path,
    )
    assert not list(tmp_path.iterdir())
