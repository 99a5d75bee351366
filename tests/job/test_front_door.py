"""`mpipar train` as a user starts it: the same losses and weights on every layout.

test_console.py tests what a run prints, test_run_ends.py how it ends.
"""

import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_all_close, assert_close, run_command, run_ranks
from in_process import alone, printed
from layout_runs import SMALL
from program import CASES, LIMIT, PROGRAM, TEXT, environment, layout_flags, metrics, mpipar, weights

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def one_rank(run_of):
    """The run folder of one rank; all others are compared with it."""
    return run_of((1, 1, 1))[0]


@pytest.mark.parametrize("layout", CASES[1:], ids=str)
def test_losses_and_weights_equal_one_rank(layout, run_of, one_rank):
    folder, _ = run_of(layout)
    lines, expected = metrics(folder), metrics(one_rank)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for key in ("loss", "grad_norm", "lr"):
        assert_close(
            [line[key] for line in lines], [line[key] for line in expected], TOLERANCE, key
        )
    assert_all_close(weights(folder), weights(one_rank), TOLERANCE)


def test_the_comparison_would_see_a_difference(one_rank, tmp_path, text_file):
    """Losses fall, and another seed gives other losses: no test above compares constants."""
    lines = metrics(one_rank)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    other = [*SMALL, "--seed", "6", "--data", text_file, "--out", tmp_path / "run"]
    assert alone(*other).returncode == 0
    for key in ("loss", "grad_norm"):
        with pytest.raises(AssertionError, match=key):
            assert_close(
                [line[key] for line in metrics(tmp_path / "run")],
                [line[key] for line in lines],
                1e-3,
                key,
            )
    with pytest.raises(AssertionError, match="difference"):
        assert_all_close(weights(tmp_path / "run"), weights(one_rank), 1e-3)


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_metrics_have_their_fields(layout, run_of):
    folder, _ = run_of(layout)
    dp, pp, tp = layout
    num_ranks = dp * pp * tp
    axes = {axis for axis, n in (("dp", dp), ("pp", pp), ("tp", tp), ("tie", pp)) if n > 1}
    if num_ranks > 1:
        axes.add("world")
    for line in metrics(folder):
        for key in ("loss", "grad_norm", "lr", "step_seconds", "tokens_per_second"):
            assert isinstance(line[key], float)
            assert line[key] > 0
        assert line["tokens_per_second"] == pytest.approx(8 * 7 / line["step_seconds"])
        assert set(line["comm"]) == axes
        for counter in line["comm"].values():
            assert set(counter) == {"calls", "bytes", "seconds_mean", "seconds_max"}
            assert counter["calls"] > 0
            assert counter["bytes"] > 0
            assert 0 < counter["seconds_mean"] <= counter["seconds_max"]
        if num_ranks > 1:
            # Summed over ranks: the one barrier of three float64 that each rank takes part in.
            world = line["comm"]["world"]
            assert (world["calls"], world["bytes"]) == (num_ranks, 40 * num_ranks)
        if pp > 1:  # each microbatch crosses pp - 1 cuts both ways, sent once and received once
            act = 8 * (8 // dp) * 7 * 18  # bytes of all its microbatches' activations
            assert line["comm"]["pp"]["bytes"] == 2 * 2 * (pp - 1) * act * dp * tp


def test_learning_rate_warms_up_and_falls(one_rank):
    rates = [line["lr"] for line in metrics(one_rank)]
    cosine = [0.05 + 0.45 * 0.5 * (1 + np.cos(np.pi * i / 3)) for i in (1, 2, 3)]
    assert rates == pytest.approx([0.25, 0.5, *cosine], rel=1e-14)


# --- configuration and weights


def test_resolved_config_reads_back(run_of, tmp_path):
    folder, _ = run_of((2, 2, 2))
    config = tomllib.loads((folder / "config.toml").read_text())
    assert (config["dp"], config["pp"], config["tp"]) == (2, 2, 2)
    assert config["num-microbatches"] == 4
    assert config["ffn"] == 31
    result = mpipar("train", "--config", folder / "config.toml", "--print-config", ranks=8).ended()
    assert tomllib.loads(result.stdout) == config
    assert list(tmp_path.iterdir()) == []


def test_config_file_gives_the_same_run(run_of, tmp_path, one_rank):
    """The file of one layout runs on another one, because flags take precedence."""
    folder, _ = run_of((2, 2, 2))
    again = tmp_path / "again"
    mpipar(
        "train",
        "--config",
        folder / "config.toml",
        "--out",
        again,
        *layout_flags((2, 1, 1)),
        ranks=2,
    ).ended()
    assert_all_close(weights(again), weights(one_rank), TOLERANCE)


def test_state_is_saved_on_the_way(tmp_path, text_file):
    """No loss survives this rate: the run fails in its second step; the first is on the disk."""
    flags = [*SMALL, "--lr", "1e140", "--clip", "0", "--sample-tokens", "0", "--data", text_file]
    broken, first = tmp_path / "broken", tmp_path / "first"
    result = mpipar(*flags, "--out", broken, "--save-interval", "1", ranks=2).ended(79)
    assert [line["step"] for line in metrics(broken)] == [1]
    result = mpipar(*flags, "--out", first, "--steps", "1", ranks=2).ended(79)
    assert "held-out loss nan" in result.stderr
    printed("ckpt", "export", broken)
    saved, expected = weights(broken), weights(first)
    assert max(np.abs(x).max() for x in expected.values()) > 1e130
    for name, x in expected.items():
        np.testing.assert_array_equal(saved[name], x, err_msg=name)


# --- the ways to start: `python -m mpipar`, the console script, with a launcher and without


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
