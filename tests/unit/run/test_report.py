"""What a run shows: report.html, metrics.csv, TensorBoard's files, and the progress line."""

import csv
import importlib.util
import io

import pytest
from in_process import assert_refused
from program import metrics
from report_cases import config_of, data_of, lines_of, run_folder, told
from short_runs import TINY, train

from mpipar.run.console import output
from mpipar.run.console.output import TAGS, Events, Log, progress
from mpipar.run.folder import truncate_after
from mpipar.run.process.streams import warn
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


def test_a_failure_is_said_and_ends_nothing(tmp_path):
    folder, said = run_folder(tmp_path), []
    (folder / "report.html" / "x").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("no json\n")
    report.write(folder, config_of(), told(), said.append)
    assert said[0].startswith("report.html and metrics.csv are without 1 damaged line")
    assert said[1] == "no report.html: Is a directory"
    assert not list(folder.glob("*.partial"))


def test_going_on_takes_away_what_was_made_of_later_steps(tmp_path):
    folder = run_folder(tmp_path)
    written(folder)
    truncate_after(folder, 25)
    assert not {"report.html", "metrics.csv"} & {path.name for path in folder.iterdir()}


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
def test_a_run_has_its_numbers_as_curves(text_folder):
    train(text_folder, *WORDS, "--out", "run")
    found = curves(text_folder / "run")
    assert set(found) == set(TAGS.values()) - {"loss_scale"}
    assert list(found["loss/held_out"]) == [4, 8, 10]
    losses = {line["step"]: line["loss"] for line in metrics(text_folder / "run")}
    assert found["loss/training"] == pytest.approx(losses, rel=1e-6)


@needs_package
def test_steps_that_are_taken_again_are_dropped(tmp_path):
    for first, last, loss in ((1, 8, 1.0), (5, 10, 2.0)):  # killed after 8, saved at 4
        events = Events(tmp_path, first)
        for step in range(first, last + 1):
            events.add({"step": step, "loss": loss, "grad_norm": None})
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
    events.close()
    assert capsys.readouterr().err.count("no more event files for TensorBoard") == 1


def test_without_the_package_the_run_does_not_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = ["--tensorboard: the package tensorboard is not installed", "pip install"]
    assert_refused(69, said, "train", "--tensorboard", folder=tmp_path)
    assert not list(tmp_path.iterdir())


# --- the progress line, which rewrites itself


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    """From its call on, standard output and error are one terminal."""

    def start(made=None):  # not before: pytest sets both streams at the start of a test
        made = made or Terminal()
        monkeypatch.setattr("sys.stdout", made)
        monkeypatch.setattr("sys.stderr", made)
        monkeypatch.setenv("TERM", "xterm")
        return made

    return start


def shown(terminal):
    """What stands on the lines of the screen: on each, what comes after the last return."""
    lines = (line.rpartition("\r")[2].strip() for line in terminal.getvalue().split("\n"))
    return [line for line in lines if line]


class Pipe(io.StringIO):
    encoding = "utf-8"


@pytest.mark.parametrize("seconds", [0, 3600])
def test_where_there_is_no_terminal_a_line_comes_only_now_and_then(
    seconds, open_terminal, monkeypatch
):
    pipe = open_terminal(Pipe())
    monkeypatch.setattr(output, "SECONDS", seconds)
    with progress("text", 50, "B") as line:
        for _ in range(50):
            line.update()
    found = pipe.getvalue().splitlines()
    assert "\r" not in pipe.getvalue()
    assert bool(found) == (seconds == 0)
    assert all(one.startswith("text: ") for one in found)


@pytest.mark.parametrize("patience", [-1, 3600])
def test_a_checkpoint_that_takes_long_has_a_line(patience, open_terminal, monkeypatch):
    terminal = open_terminal()
    monkeypatch.setattr(output, "PATIENCE_SECONDS", patience)
    assert b"".join(output.watched("checkpoint", [b"ab", b"cd", b"e"], 5)) == b"abcde"
    assert ("checkpoint: " in terminal.getvalue()) == (patience < 0)


@pytest.mark.parametrize(
    ("rank", "term", "kind", "taken"),
    [
        (0, "xterm", Terminal, True),
        (0, "dumb", Terminal, False),
        (0, "xterm", Pipe, False),
        (1, "xterm", Terminal, False),
    ],
)
def test_when_steps_have_a_line(rank, term, kind, taken, open_terminal, monkeypatch):
    open_terminal(kind())
    monkeypatch.setenv("TERM", term)
    log = Log(rank)
    with log.steps(0, 9):
        assert (log.line is not None) == taken
    assert log.line is None


def test_the_screen_holds_the_log_but_for_the_lines_of_steps(open_terminal):
    """Of these only the last."""
    terminal, log = open_terminal(), Log(0)
    log("the layout")
    with log.steps(0, 9):
        for step in range(1, 10):
            log.step(f"step {step}/9", last=step == 9)
            log.status("loss 1.0")
            if step == 5:
                log("saved")
                warn("late")
    log("the end")
    assert "\rtrain: " in terminal.getvalue()
    assert shown(terminal) == [
        "the layout",
        "saved",
        "mpipar: warning: late",
        "step 9/9",
        "the end",
    ]
