"""`mpipar train` as a user starts it: the same losses and weights on every layout.

test_console.py tests what a run prints, test_run_ends.py how it ends.
"""

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from helpers import REPOSITORY, assert_all_close, assert_close, run_command, run_ranks
from in_process import alone, printed
from layout_runs import SMALL
from program import (
    BLOCK,
    CASES,
    LIMIT,
    PROGRAM,
    TEXT,
    block_of,
    environment,
    layout_flags,
    metrics,
    mpipar,
    weights,
)

from mpipar.run.process.mpi import OneRank

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


def test_resolved_config_reads_back(run_of):
    folder, _ = run_of((2, 2, 2))
    config = tomllib.loads((folder / "config.toml").read_text())
    assert (config["dp"], config["pp"], config["tp"]) == (2, 2, 2)
    assert config["num-microbatches"] == 4
    assert config["ffn"] == 31
    again = printed("train", "--config", folder / "config.toml", "--print-config", ranks=8)
    assert tomllib.loads(again) == config


def test_config_file_gives_the_same_run(run_of, tmp_path, one_rank):
    """The file of one layout runs on another one, because flags take precedence."""
    folder, _ = run_of((2, 2, 2))
    again = tmp_path / "again"
    alone("train", "--config", folder / "config.toml", "--out", again, *layout_flags((1, 1, 1)))
    assert_all_close(weights(again), weights(one_rank), TOLERANCE)


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


@needs_script
def test_console_script(tmp_path):
    result = run_command([SCRIPT, *SHORT, *TEXT], LIMIT, environment(), tmp_path)
    assert_trained(result, tmp_path / "runs" / "0001")


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 5))]
)
def test_any_number_of_ranks_gets_a_layout(ranks, tmp_path):
    words = [*SHORT, *TEXT, "--layers", "2", "--batch-size", "60"]
    result = run_ranks(ranks, [*PROGRAM, *words], LIMIT, environment(), tmp_path)
    assert_trained(result, tmp_path / "runs" / "0001")
    assert f"{ranks} rank{'s' * (ranks > 1)} on 1 host" in result.stdout


# --- one process works where no MPI library can be loaded; several ranks are refused with a cure


NOWHERE = {"MPI4PY_LIBMPI": "/nowhere"}
WARNING = "mpipar: warning: MPI cannot be loaded ("
SIZES = "--layers 2 --d-model 16 --heads 2 --seq-len 16 --batch-size 4".split()
THREE_STEPS = ("train", *SIZES, *TEXT, "--steps", "3", "--sample-tokens", "0")


@pytest.fixture
def nothing_installed(tmp_path):
    """The environment of a process whose mpi4py has no module MPI."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['mpi4py.MPI'] = None\n")
    return {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}


def without_mpi(*words, env=NOWHERE, cwd):
    """Run a command that must end well, after one warning; return how it ended."""
    result = mpipar(*words, env=env, cwd=cwd).ended()
    assert result.stderr.count(WARNING) == 1, result.tail()
    assert result.stderr.count("\n") == 1, result.tail()
    return result


def test_training_computes_what_it_computes_with_a_library(tmp_path):
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    with_mpi = mpipar(*THREE_STEPS, cwd=tmp_path / "with").ended()
    assert with_mpi.stderr == ""
    without_mpi(*THREE_STEPS, "--trace", "1:2", "--check-comm", cwd=tmp_path / "without")
    one, other = (tmp_path / name / "runs" / "0001" for name in ("with", "without"))
    assert [line["loss"] for line in metrics(one)] == [line["loss"] for line in metrics(other)]
    wanted, got = weights(one), weights(other)
    assert wanted.keys() == got.keys()
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


def test_a_library_that_is_not_installed_is_one_that_cannot_be_loaded(tmp_path, nothing_installed):
    result = without_mpi(*THREE_STEPS, env=nothing_installed, cwd=tmp_path)
    # the second cure is that of a system with Debian's MPICH
    assert re.search(r"install one with pip install '.\[mpich\]'|its mpiexec", result.stderr)
    assert "held-out loss" in result.stdout


def test_several_ranks_are_refused(tmp_path):
    result = run_ranks(2, [*PROGRAM, *THREE_STEPS], LIMIT, environment(NOWHERE), tmp_path)
    block_of(result, 69, "unset MPI4PY_LIBMPI, or load your cluster's MPI")
    assert WARNING not in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_launcher_of_one_rank_gets_one(tmp_path):
    variables = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    result = without_mpi("doctor", env=NOWHERE | variables, cwd=tmp_path)
    assert "MPICH's mpiexec" in result.stdout
    assert "MPI library none" in " ".join(result.stdout.split())
    assert BLOCK not in result.stderr


def test_one_rank_gets_what_it_sends():
    world, x, into = OneRank("a reason"), np.arange(3.0), np.zeros((1, 3))
    world.Allgather(x, into)
    assert np.array_equal(into[0], x)
    codes = bytearray(1)
    world.Dup().Allgather(bytes([7]), codes)
    assert codes == b"\7"
    assert (world.Split(0, 0).rank, world.size, world.Ibarrier().Test()) == (0, 1, True)
    with pytest.raises(ValueError, match="different structures"):
        world.Allreduce(x, into[:, :2].copy())
