"""The contents of report.html and metrics.csv, whatever is missing, hostile or in the way."""

import csv
import re

import pytest
from report_cases import config_of, data_of, lines_of, run_folder, told
from short_runs import TINY, ended, train

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
    assert [one["title"] for one in data["curves"]] == [
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Speed",
        "Time in barriers",
    ]
    training, held_out = data["curves"][0]["series"]
    assert len(training["points"]) == 40
    assert held_out["points"] == [[step, 6 / step**0.5] for step in (10, 20, 30, 40)]
    titles = [table["title"] for table in data["tables"]]
    assert titles == [
        "Layout",
        "Environment",
        *(f"Configuration: {name}" for name in ("model", "grid", "train", "run", "memory")),
    ]
    train_section = dict(data["tables"][titles.index("Configuration: train")]["rows"])
    assert train_section["lr-schedule"] == "cosine"
    assert data["log"] == "a line\n"
    assert "timeline" not in data


def test_a_run_without_evaluations_or_steps_has_a_page_too(tmp_path):
    folder = run_folder(tmp_path, evaluations=False)
    data, _ = written(folder)
    assert len(data["curves"][0]["series"]) == 1
    empty = run_folder(tmp_path, steps=0, name="empty")
    data, _ = written(empty, state="failed in step 1 of 40")
    assert (data["curves"], data["summary"]) == ([], [])
    assert (empty / "metrics.csv").read_text().startswith("held_out_loss_nats")


def test_hostile_names_stay_text(tmp_path):
    folder = run_folder(tmp_path, name="<b>run", log=HOSTILE)
    config = config_of("--data", HOSTILE)
    data, _ = written(folder, config, environment=[("command", HOSTILE)])
    assert data["log"] == HOSTILE
    assert dict(data["tables"][1]["rows"])["command"] == HOSTILE
    assert "://" not in (folder / "report.html").read_text().replace(
        "http://www.w3.org/2000/svg", ""
    ), "a page loads nothing"


def test_the_csv_has_the_numbers_of_the_lines(tmp_path):
    folder = run_folder(tmp_path)
    written(folder)
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert list(rows[0]) == [
        "step",
        "loss_nats",
        "held_out_loss_nats",
        "grad_norm",
        "lr",
        "step_seconds",
        "tokens_per_second",
        "comm_share_mean",
        "comm_share_max",
        "comm_tp_calls",
        "comm_tp_bytes",
        "comm_tp_seconds_mean",
        "comm_tp_seconds_max",
    ]
    for row, line in zip(rows, lines_of(40), strict=True):
        assert float(row["loss_nats"]) == line["loss"]
        assert (row["step"], row["comm_tp_bytes"]) == (str(line["step"]), "4096")
    assert [row["step"] for row in rows if row["held_out_loss_nats"]] == ["10", "20", "30", "40"]


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
    assert {path.name for path in folder.iterdir()} == {
        "metrics.jsonl",
        "evaluations.jsonl",
        "log.txt",
    }
    written(folder)
    assert len((folder / "metrics.csv").read_text().splitlines()) == 1 + 25
    assert len((folder / "evaluations.jsonl").read_text().splitlines()) == 2


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
