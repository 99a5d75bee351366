"""The contents of report.html, metrics.csv and TensorBoard's files, whatever is in the way."""

import csv
import importlib.util
import re

import pytest
from in_process import assert_refused
from program import metrics, mpipar
from report_cases import config_of, data_of, lines_of, run_folder, told
from short_runs import TINY, ended, train

from mpipar.run.console.tensorboard import TAGS, Events
from mpipar.run.folder import truncate_after
from mpipar.study import report

HOSTILE = "</script><script>alert(1)</script><!--\x1b[2J[[DATA]]"


def written(folder, config=None, **changes):
    """(the page's data, the lines of the log) of writing both files."""
    said = []
    report.write(folder, config or config_of(), told(**changes), said.append)
    return data_of((folder / "report.html").read_text()), said


def test_what_the_page_shows(tmp_path):
    folder = run_folder(tmp_path)
    data, said = written(folder)
    assert said == ["report.html shows the run; open it in a browser"]
    assert data["title"] == "run: dp 1 x pp 1 x tp 1, 1f1b"
    assert data["state"] == "ended after step 40"
    found = {name: value for name, value, _ in data["summary"]}
    assert found["held-out loss"] == f"{6 / 40**0.5:.4f}"
    assert found["trained on"] == "40.96k"  # 40 steps of 16 rows of 64 tokens
    assert (found["speed"], found["time in barriers"]) == ("4.12k", "25%")
    assert len(data["curves"]) == 5
    training, held_out = data["curves"][0]["series"]
    assert len(training["points"]) == 40
    assert held_out["points"] == [[step, 6 / step**0.5] for step in (10, 20, 30, 40)]
    tables = {table["title"]: table["rows"] for table in data["tables"]}
    assert ["lr-schedule", "cosine"] in tables["Configuration: train"]
    assert data["log"] == "a line\n"
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert list(rows[0])[1:4] == ["loss_nats", "held_out_loss_nats", "grad_norm"]
    for row, line in zip(rows, lines_of(40), strict=True):
        assert float(row["loss_nats"]) == line["loss"]
        assert (row["step"], row["comm_tp_bytes"]) == (str(line["step"]), "4096")
    assert [row["step"] for row in rows if row["held_out_loss_nats"]] == ["10", "20", "30", "40"]


def test_hostile_names_stay_text(tmp_path):
    folder = run_folder(tmp_path, name="<b>run", log=HOSTILE)
    config = config_of("--data", HOSTILE)
    data, _ = written(folder, config, environment=[("command", HOSTILE)])
    assert data["log"] == HOSTILE
    assert dict(data["tables"][1]["rows"])["command"] == HOSTILE
    assert "://" not in (folder / "report.html").read_text().replace(
        "http://www.w3.org/2000/svg", ""
    ), "a page loads nothing"


@pytest.mark.parametrize("name", ["report.html", "metrics.csv"])
def test_a_failure_is_said_and_ends_nothing(name, tmp_path):
    folder, said = run_folder(tmp_path), []
    (folder / name / "x").mkdir(parents=True)
    report.write(folder, config_of(), told(), said.append)
    assert said == ["no report.html: Is a directory"]
    (folder / "metrics.jsonl").write_text("no json\n")
    report.write(folder, config_of(), told(), said.append)
    assert said[1].startswith("report.html and metrics.csv are without 1 damaged line")
    assert said[2] == "no report.html: Is a directory"
    assert not list(folder.glob("*.partial"))


def test_going_on_takes_away_what_was_made_of_later_steps(tmp_path):
    folder = run_folder(tmp_path)
    written(folder)
    truncate_after(folder, 25)
    kept = {"metrics.jsonl", "evaluations.jsonl", "log.txt"}
    assert {path.name for path in folder.iterdir()} == kept


def steps_and_losses(folder):
    return [
        (row["step"], row["loss_nats"], row["held_out_loss_nats"])
        for row in csv.DictReader((folder / "metrics.csv").open())
    ]


def test_a_stopped_run_has_both_and_goes_on_in_them(text_folder):
    words = [*TINY, "--eval-interval", "4", "--eval-tokens", "40"]
    train(text_folder, *words, "--out", "whole")
    ended(text_folder, "stop", 6, *words, "--out", "run").ended(75)
    data = data_of((text_folder / "run" / "report.html").read_text())
    last = int(re.fullmatch(r"stopped on request after step (\d) of 10", data["state"])[1])
    assert len(steps_and_losses(text_folder / "run")) == last >= 6
    text = train(text_folder, "--resume", "auto", "--out", "run")
    assert "report.html shows the run; open it in a browser" in text
    assert steps_and_losses(text_folder / "run") == steps_and_losses(text_folder / "whole")
    pages = [data_of((text_folder / name / "report.html").read_text()) for name in ("run", "whole")]
    assert pages[0]["state"] == "ended after step 10"
    assert pages[0]["curves"][:3] == pages[1]["curves"][:3]
    assert "held-out loss" in pages[0]["log"]
    assert dict(pages[0]["tables"][1]["rows"])["command"].startswith("mpipar train --resume auto")


# --- event files for TensorBoard: read back by TensorBoard itself, also after a run was resumed


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
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = ["--tensorboard: the package tensorboard is not installed", "pip install"]
    assert_refused(69, said, "train", "--tensorboard", folder=tmp_path)
    assert not list(tmp_path.iterdir())
