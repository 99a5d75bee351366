"""ZeRO from the command line: its barriers, and a killed run that is resumed without it."""

import pytest
from in_process import alone
from program import metrics, mpipar
from test_resume_runs import ended, prepare

from mpipar.checkpoint.manifest import committed_steps

pytestmark = pytest.mark.slow
TEXT = """--data text.txt --layers 4 --d-model 16 --heads 4 --ffn 24 --seq-len 8 --batch-size 8
    --num-microbatches 2 --sample-tokens 0 --steps 10 --dtype float64""".split()


def losses(folder):
    return [line["loss"] for line in metrics(folder)]


def test_its_barriers_are_shown(tmp_path):
    words = "--steps 2 --layers 1 --batch-size 8 --sample-tokens 0 --eval-tokens 64 --dp 2 --zero 1"
    done = mpipar("train", *words.split(), ranks=2, cwd=tmp_path).ended()
    assert "gradient reduce-scatter: its rank computed in" in done.stdout
    assert "weights.bucket  all_gather" in done.stdout


def test_a_killed_run_goes_on_without_what_it_shared_out(tmp_path):
    """Killed under --zero 3 --cp 2, it resumes with tp 2 x pp 2, as one rank would have."""
    prepare(tmp_path)
    alone("train", *TEXT, "--out", "alone", cwd=tmp_path).ended()
    shared = "--layout dp=2,cp=2 --zero 3 --save-interval 2".split()
    ended(tmp_path, "kill", 5, *TEXT, "--out", "run", *shared, ranks=4)
    steps = [step for step, _ in committed_steps(tmp_path / "run" / "checkpoints")]
    assert steps
    assert steps[-1] < 10
    done = mpipar(
        "train", "--resume", "auto", "--out", "run", "--layout", "tp=2,pp=2", ranks=4, cwd=tmp_path
    ).ended()
    assert "--zero 0 (3 before)" in done.stdout
    assert (
        max(
            abs(a - b)
            for a, b in zip(losses(tmp_path / "alone"), losses(tmp_path / "run"), strict=True)
        )
        < 1e-10
    )
