"""`mpipar train --steps 0`: the held-out loss of given weights, and nothing that trains."""

import json

import pytest
from in_process import alone
from program import mpipar

SMALL = """--layers 2 --d-model 8 --heads 2 --seq-len 8 --batch-size 4 --num-microbatches 2
    --dtype float64 --sample-tokens 4 --data text.txt""".split()


def result(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.fixture
def trained(text_folder):
    alone("train", *SMALL, "--steps", "2", "--out", "first", cwd=text_folder).ended()
    return text_folder


def evaluate(folder, *words):
    words = ["--init-from", "first", "--steps", "0", *words]
    return alone("train", *SMALL, *words, cwd=folder).ended()


def test_given_weights_are_evaluated_and_sampled_but_not_written(trained):
    shown = evaluate(trained, "--out", "again").stdout
    expected = result(trained / "first")["held_out_loss"]
    assert result(trained / "again") == {"step": 0, "held_out_loss": expected}
    lines = (trained / "again" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["held_out_loss"] for line in lines] == [expected]
    assert f"held-out loss {expected:.4f} nats per token" in shown
    assert "text generated from" in shown
    for word in ("trained on", "WARNING", "damaged", "warm-up"):
        assert word not in shown
    assert not list((trained / "again").glob("weights/*.safetensors"))
    assert not (trained / "again" / "checkpoints").exists()


def test_initial_weights_and_a_run_that_goes_on(trained):
    alone("train", *SMALL, "--steps", "0", "--out", "new", cwd=trained).ended()
    assert result(trained / "new")["held_out_loss"] == pytest.approx(5.545, abs=0.01), "ln 256"
    evaluate(trained, "--out", "again")
    words = ["--resume", "auto", "--out", "again", "--steps", "1"]
    shown = alone("train", *words, cwd=trained).ended().stdout
    assert "the run starts at step 1, from the weights of first" in shown
    assert result(trained / "again")["step"] == 1


def test_a_run_is_not_resumed_for_no_steps(trained):
    words = ["--resume", "first", "--steps", "0"]
    block = alone("train", *SMALL, *words, cwd=trained).ended(2).stderr
    assert "step 2; use 2 or more, or evaluate its weights with --steps 0 --init-from" in block


@pytest.mark.parametrize("layout", ["tp=2,pp=2", "dp=2,cp=2"])
def test_every_layout_finds_the_loss_of_one_rank(layout, trained):
    words = [*SMALL, "--init-from", "first", "--steps", "0", "--out", layout, "--layout", layout]
    mpipar("train", *words, ranks=4, cwd=trained).ended()
    expected = result(trained / "first")["held_out_loss"]
    assert result(trained / layout)["held_out_loss"] == pytest.approx(expected, rel=1e-12, abs=0)
