"""The ways to start: `python -m mpipar`, the console script, with a launcher and without."""

import sys
from pathlib import Path

import pytest
from helpers import run_command, run_ranks
from program import LIMIT, PROGRAM, TEXT, environment, metrics

SHORT = """train --layers 1 --d-model 8 --heads 1 --seq-len 4 --batch-size 64 --num-microbatches 1
    --steps 2 --sample-tokens 2""".split()
SCRIPT = Path(sys.executable).with_name("mpipar")
needs_script = pytest.mark.skipif(not SCRIPT.exists(), reason="mpipar is not installed here")


def assert_trained(result, folder):
    assert result.returncode == 0, result.tail()
    assert result.stderr == ""
    assert "held-out loss" in result.stdout
    assert len(metrics(folder)) == 2
    assert (folder / "weights" / "model.safetensors").exists()


def test_one_rank_needs_no_launcher(tmp_path):
    result = run_command([*PROGRAM, *SHORT], LIMIT, environment(), tmp_path)
    assert_trained(result, tmp_path / "runs" / "0001")
    assert "1 rank on 1 host" in result.stdout


@needs_script
def test_console_script(tmp_path):
    result = run_command([SCRIPT, *SHORT, *TEXT], LIMIT, environment(), tmp_path)
    assert_trained(result, tmp_path / "runs" / "0001")


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3, 5))]
)
def test_any_number_of_ranks_gets_a_layout(ranks, tmp_path):
    words = [*SHORT, *TEXT, "--layers", "2", "--batch-size", "60"]
    result = run_ranks(ranks, [*PROGRAM, *words], LIMIT, environment(), tmp_path)
    assert_trained(result, tmp_path / "runs" / "0001")
    assert f"{ranks} rank{'s' * (ranks > 1)} on 1 host" in result.stdout
