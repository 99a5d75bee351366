"""Evaluation during a run: the run is the same without them; its data; refusals."""

import json

import numpy as np
import pytest
from config_helpers import changed
from in_process import assert_refused
from program import killed_by
from short_runs import TINY, assert_same_run, ended, train

from mpipar.run.data.rows import load

OFTEN = "--eval-interval 3 --eval-tokens 40".split()


def evaluations(folder):
    """The lines of evaluations.jsonl, without times."""
    lines = map(json.loads, (folder / "evaluations.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_evaluation_changes_nothing(text_folder):
    train(text_folder, *TINY, "--eval-tokens", 40, "--out", "plain")
    text = train(text_folder, *TINY, *OFTEN, "--out", "often")
    assert_same_run(text_folder / "plain", text_folder / "often")
    found = evaluations(text_folder / "often")
    assert [line["step"] for line in found] == [3, 6, 9, 10]
    assert {line["tokens"] for line in found} == {40}
    assert found[-1:] == evaluations(text_folder / "plain")
    result = json.loads((text_folder / "often" / "result.json").read_text())
    assert result["held_out_loss"] == found[-1]["held_out_loss"]
    for line in found[:-1]:
        assert (
            f"step {line['step']}: held-out loss {line['held_out_loss']:.4f} nats per token"
            " over 40 tokens, "
        ) in text
    assert text.count("2 microbatches (gradient accumulation)") == 1


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_evaluations(text_folder):
    words = [*TINY, *OFTEN, "--pp", "2"]
    train(text_folder, *words, "--out", "whole", ranks=2)
    result = ended(
        text_folder, "kill", 10, *words, "--out", "killed", "--save-interval", "5", ranks=2
    )
    killed_by(result, 9)
    assert [line["step"] for line in evaluations(text_folder / "killed")] == [3, 6, 9]
    train(text_folder, *words, "--resume", "auto", "--out", "killed", ranks=2)
    assert_same_run(text_folder / "whole", text_folder / "killed")
    assert evaluations(text_folder / "killed") == evaluations(text_folder / "whole")


# --- held-out data of its own


def test_with_val_data_all_of_data_is_trained_on(tmp_path):
    (tmp_path / "a.txt").write_text("abc" * 100)
    (tmp_path / "b.txt").write_text("xyz" * 10)
    (train_part, held_out), what = load(
        changed(
            data=(str(tmp_path / "a.txt"),),
            val_data=(str(tmp_path / "b.txt"),),
            seq_len=5,
            batch_size=4,
        )
    )
    assert (len(train_part), bytes(held_out)) == (300, b"xyz" * 10)
    assert what == "300 bytes from 1 file; held out: 30 bytes from 1 file"


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        ("--val-data nothing.txt", 65, ["--val-data nothing.txt: no such file"]),
        ("--val-data short.txt", 65, ["--val-data: has 3 tokens, but a row needs 64 + 1"]),
        ("--data text.txt --val-data ids.bin", 65, ["--val-data: either it or --data is text"]),
    ],
)
def test_refusals(words, code, parts, tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "text.txt").write_text("some text " * 500)
    np.zeros(500, np.uint16).tofile(tmp_path / "ids.bin")
    assert_refused(code, parts, "train", *words.split(), folder=tmp_path)
