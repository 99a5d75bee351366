"""The output of `mpipar train`: layout, schedule, progress, barriers, memory, losses, text."""

import re

import numpy as np
import pytest
from helpers import run_command
from in_process import alone
from program import CASES, LIMIT, PROGRAM, cells, environment, metrics, section

from mpipar.run import training
from mpipar.run.console.tables import BARRIER, step_line

STEP_LINE = re.compile(
    r"step (\d)/5 loss (\d\.\d{4}) norm \d\.\d{3} \d+ ms \S+ tok/s comm \d+% eta \d+:\d\d"
)


@pytest.mark.parametrize("layout", [(2, 2, 2)], ids=str)
def test_console_has_a_line_per_log_interval(layout, run_of):
    folder, text = run_of(layout)
    found = [STEP_LINE.fullmatch(line) for line in text.splitlines() if line.startswith("step ")]
    assert [match[1] for match in found] == ["1", "2", "4", "5"]
    lines = metrics(folder)
    for match in found:
        assert match[2] == f"{lines[int(match[1]) - 1]['loss']:.4f}"


@pytest.mark.parametrize("layout", CASES[1:], ids=str)
def test_barrier_table_adds_up_to_the_metrics(layout, run_of):
    folder, text = run_of(layout)
    rows = [cells(line) for line in section(text, "barriers of a step")]
    assert rows[0] == [*BARRIER, "ms mean", "ms max"]
    calls = {}
    for row in rows[1:]:
        calls[row[0]] = calls.get(row[0], 0) + float(row[5])
    comm = metrics(folder)[-1]["comm"]
    assert calls == {axis: counter["calls"] for axis, counter in comm.items()}
    names = {row[1] for row in rows[1:]}
    assert "step.norm" in names
    assert ("block*.ffn.down" in names) == (layout[2] > 1)
    assert ("grads.bucket" in names) == (layout[0] > 1)


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_measured_memory_stands_beside_the_predicted(layout, run_of):
    _, text = run_of(layout)
    rows = [cells(line) for line in section(text, "memory per rank")]
    assert [row[0] for row in rows[1:]] == [str(i) for i in range(np.prod(layout))]
    for row in rows[1:]:
        assert float(row[3]) > 0.9, "an array that the prediction has was never made"
        assert not row[4].startswith("0 B"), "Python has made no object"
    predicted = [cells(line)[-1] for line in section(text, "rank host")]
    assert [row[1] for row in rows[1:]] == predicted


def test_memory_is_shown_before_it_is_taken(tmp_path):
    """A model does not fit: its bytes are on the console before the allocation fails."""
    huge = "--layers 2 --d-model 65536 --heads 2 --seq-len 8 --batch-size 2 --num-microbatches 1"
    command = [*PROGRAM, "train", *huge.split(), "--out", str(tmp_path / "run")]
    limited = ["bash", "-c", 'ulimit -v 16777216; exec "$@"', "limited", *command]
    result = run_command(limited, LIMIT, environment()).ended(69)
    assert re.search(r"out of memory: weights .* of block\d+\..* wants [\d.]+ GiB", result.stderr)
    peak = re.search(r"([\d.]+) GiB$", section(result.stdout, "rank host place")[0])
    assert float(peak[1]) > 4 * 24 * 4 * 65536**2 / 2**30  # weights, gradients and two moments


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_held_out_loss_and_text_are_those_of_one_rank(layout, run_of):
    _, text = run_of(layout)
    _, expected = run_of((1, 1, 1))
    held_out = re.compile(
        r"^held-out loss (\d\.\d{4}) nats per token over ([\d,]+) tokens"
        r" \(trained on 280 tokens in [\d.]+ s\)$",
        re.MULTILINE,
    )
    assert held_out.search(text).groups() == held_out.search(expected).groups()
    bigram = re.compile(
        r"^byte-bigram model of the same split: (\d\.\d{4}); .* worse$", re.MULTILINE
    )
    assert bigram.search(text)[1] == bigram.search(expected)[1]
    title = "text generated from 'The ':\n"
    shown = text.split(title)[1].split("\n\nbarriers of a step", 1)[0]
    assert shown == expected.split(title)[1].split("\n\nbarriers of a step", 1)[0]
    assert shown.startswith("| The ")
    assert len(shown) > len("The ")


def test_speed_of_a_line_is_that_of_its_milliseconds():
    line = {"step": 7, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "step_seconds": 0.1}
    line |= {"tokens_per_second": 10_000.0, "comm_share_mean": 0.0, "comm_share_max": 0.0}
    assert " 250 ms 4.00k tok/s " in step_line(9, line, 0.25)
    long = line | {"step": 9999, "loss": 10.5, "tokens_per_second": 2e7}
    assert len(step_line(20000, long, 12.345)) <= 80


def test_a_line_comes_after_ten_seconds_at_the_latest(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SECONDS", 0.0)
    words = ["--layers", 1, "--d-model", 8, "--heads", 2, "--seq-len", 8, "--steps", 4]
    words += ["--sample-tokens", 0, "--eval-tokens", 8, "--log-interval", 9, "--out", "run"]
    text = alone("train", *words, cwd=tmp_path).ended().stdout
    assert re.findall(r"^step (\d)/4 loss ", text, re.MULTILINE) == ["1", "2", "3", "4"]


def test_log_file_is_the_console(run_of):
    folder, text = run_of((2, 2, 2))
    assert (folder / "log.txt").read_text() == text
    last = f"weights, checkpoints, metrics, report.html, config.toml and log.txt are in {folder}"
    assert text.splitlines()[-1] == last
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "log.txt",
        "metrics.jsonl",
        "evaluations.jsonl",
        "metrics.csv",
        "report.html",
        "config.toml",
        "sources.json",
        "weights",
        "checkpoints",
        "result.json",
    }
