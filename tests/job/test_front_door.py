"""`mpipar train` as a user starts it: losses, weights and console; test_run_ends.py: its ends."""

import re
import tomllib

import numpy as np
import pytest
from helpers import REPOSITORY, assert_all_close, assert_close, run_command, run_ranks
from in_process import printed
from program import (
    LIMIT,
    PROGRAM,
    TEXT,
    block_of,
    cells,
    environment,
    metrics,
    mpipar,
    section,
    weights,
)

TOLERANCE = 1e-10
ONE, EIGHT = (1, 1, 1), (2, 2, 2)  # layouts (dp, pp, tp); lives have the others
# 6 heads of width 3, 7 tokens: odd on purpose; ffn 31 and 256 bytes are padded for 3 ranks.
SMALL = """train --dtype float64 --optimizer sgd --lr 0.5 --warmup-steps 2 --steps 5 --seed 5
    --layers 4 --d-model 18 --heads 6 --ffn 31 --seq-len 7 --batch-size 8 --num-microbatches 2
    --log-interval 2 --sample-tokens 12""".split()
# What must not change a digit.
OTHERWISE = "--dp 2 --pp 2 --tp 2 --num-microbatches 4 --rank-order tp,cp,dp,pp".split()


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """A short English text, the same everywhere."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    words = "the cat sat on the mat and a dog ran to the old red barn while it was raining".split()
    path.write_text(" ".join(np.random.default_rng(3).choice(words, 800)))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text_file):
    """Return {layout: (run folder, what was printed)}."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for layout, ranks, more in ((ONE, None, []), (EIGHT, 8, OTHERWISE)):
        out = folder / str(ranks)
        result = mpipar(*SMALL, *more, "--data", text_file, "--out", out, ranks=ranks).ended()
        assert result.stderr == "", result.tail()
        found[layout] = out, result.stdout
    return found


@pytest.fixture(scope="module")
def one_rank(runs):
    """The run folder of one rank; the other is compared with it."""
    return runs[ONE][0]


def test_losses_and_weights_equal_one_rank(runs, one_rank):
    folder, _ = runs[EIGHT]
    lines, expected = metrics(folder), metrics(one_rank)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for key in ("loss", "grad_norm", "lr"):
        assert_close(
            [line[key] for line in lines], [line[key] for line in expected], TOLERANCE, key
        )
    assert_all_close(weights(folder), weights(one_rank), TOLERANCE)


@pytest.mark.parametrize("layout", [ONE, EIGHT], ids=str)
def test_metrics_have_their_fields(layout, runs):
    folder, _ = runs[layout]
    dp, pp, tp = layout
    num_ranks = dp * pp * tp
    sizes = {"dp": dp, "pp": pp, "tp": tp, "tie": pp, "world": num_ranks}
    for line in metrics(folder):
        assert line["tokens_per_second"] == pytest.approx(8 * 7 / line["step_seconds"])
        assert set(line["comm"]) == {axis for axis, size in sizes.items() if size > 1}
        for counter in line["comm"].values():
            assert counter["calls"] > 0
            assert 0 < counter["seconds_mean"] <= counter["seconds_max"]
        if num_ranks > 1:
            # Summed over ranks: the one barrier of three float64 that each rank takes part in.
            world = line["comm"]["world"]
            assert (world["calls"], world["bytes"]) == (num_ranks, 40 * num_ranks)
        if pp > 1:  # each microbatch crosses pp - 1 cuts both ways, sent once and received once
            act = 8 * (8 // dp) * 7 * 18  # bytes of all its microbatches' activations
            assert line["comm"]["pp"]["bytes"] == 2 * 2 * (pp - 1) * act * dp * tp


# --- configuration and weights


def test_resolved_config_reads_back(runs):
    folder, _ = runs[EIGHT]
    config = tomllib.loads((folder / "config.toml").read_text())
    assert (config["dp"], config["pp"], config["tp"]) == (2, 2, 2)
    assert config["num-microbatches"] == 4
    assert config["ffn"] == 31
    again = printed("train", "--config", folder / "config.toml", "--print-config", ranks=8)
    assert tomllib.loads(again) == config


# --- the console: layout, progress, barriers, memory, losses, text


@pytest.mark.parametrize("layout", [ONE, EIGHT], ids=str)
def test_measured_memory_stands_beside_the_predicted(layout, runs):
    _, text = runs[layout]
    rows = [cells(line) for line in section(text, "memory per rank")]
    assert [row[0] for row in rows[1:]] == [str(i) for i in range(np.prod(layout))]
    for row in rows[1:]:
        assert float(row[3]) > 0.9, "an array that the prediction has was never made"
    predicted = [cells(line)[-1] for line in section(text, "rank host")]
    assert [row[1] for row in rows[1:]] == predicted


def test_memory_is_shown_before_it_is_taken(tmp_path):
    """A model does not fit: its bytes are on the console before the allocation fails."""
    huge = "--layers 2 --d-model 65536 --heads 2 --seq-len 8 --batch-size 2 --num-microbatches 1"
    command = [*PROGRAM, "train", *huge.split(), "--out", str(tmp_path / "run")]
    limited = ["bash", "-c", 'ulimit -v 16777216; exec "$@"', "limited", *command]
    result = run_command(limited, LIMIT, environment()).ended(69)
    assert re.search(r"out of memory: weights of block\d+\..* [\d.]+ GiB for an", result.stderr)
    peak = re.search(r"([\d.]+) GiB$", section(result.stdout, "rank host place")[0])
    assert float(peak[1]) > 4 * 24 * 4 * 65536**2 / 2**30  # weights, gradients and two moments


def test_held_out_loss_and_text_are_those_of_one_rank(runs):
    (_, text), (_, expected) = runs[EIGHT], runs[ONE]
    for part in (
        r"^held-out loss (\d\.\d{4}) ",
        r"^byte-bigram model of the same split: (\d\.\d{4});",
        r"text generated from 'The ':\n(\| The (?s:.+?))\n\n",
    ):
        found = re.search(part, text, re.MULTILINE)[1]
        assert found == re.search(part, expected, re.MULTILINE)[1]


def test_log_file_is_the_console(runs):
    folder, text = runs[EIGHT]
    assert (folder / "log.txt").read_text() == text
    made = """log.txt metrics.jsonl evaluations.jsonl metrics.csv report.html config.toml
        sources.json weights checkpoints result.json"""
    assert {path.name for path in folder.iterdir()} == {*made.split()}


# --- the ways to start: `python -m mpipar`, the console script, with a launcher and without


SHORT = """train --layers 1 --d-model 8 --heads 1 --seq-len 4 --batch-size 64 --num-microbatches 1
    --steps 2 --sample-tokens 2""".split()


def assert_trained(result, folder):
    assert result.returncode == 0, result.tail()
    assert result.stderr == ""
    assert "held-out loss" in result.stdout
    assert len(metrics(folder)) == 2
    assert (folder / "weights" / "model.safetensors").exists()


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_any_number_of_ranks_gets_a_layout(ranks, tmp_path):
    words = [*SHORT, *TEXT, "--layers", "2", "--batch-size", "60"]
    result = run_ranks(ranks, [*PROGRAM, *words], LIMIT, environment(), tmp_path)
    assert_trained(result, tmp_path / "runs" / "0001")
    assert f"{ranks} rank{'s' * (ranks > 1)} on 1 host" in result.stdout


# --- one process works where no MPI library can be loaded; several ranks are refused with a cure


NOWHERE = {"MPI4PY_LIBMPI": "/nowhere"}
WARNING = "mpipar: warning: MPI cannot be loaded ("


def without_mpi(*words, env=NOWHERE, cwd):
    """Run a command that must end well, after one warning; return how it ended."""
    result = mpipar(*words, env=env, cwd=cwd).ended()
    assert result.stderr.count(WARNING) == 1, result.tail()
    assert result.stderr.count("\n") == 1, result.tail()
    return result


def test_training_computes_what_it_computes_with_a_library(one_rank, text_file, tmp_path):
    words = ["--data", text_file, "--trace", "1:2", "--check-comm", "--out", tmp_path / "run"]
    without_mpi(*SMALL, *words, cwd=tmp_path)
    wanted, got = metrics(one_rank), metrics(tmp_path / "run")
    assert [line["loss"] for line in got] == [line["loss"] for line in wanted]
    wanted, got = weights(one_rank), weights(tmp_path / "run")
    assert wanted.keys() == got.keys()
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


def test_a_library_that_is_not_installed_is_one_that_cannot_be_loaded(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['mpi4py.MPI'] = None\n")
    env = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    result = without_mpi(*SHORT, *TEXT, env=env, cwd=tmp_path)
    # the second cure is that of a system with Debian's MPICH
    assert re.search(r"install one with pip install '.\[mpich\]'|its mpiexec", result.stderr)
    assert "held-out loss" in result.stdout


def test_several_ranks_are_refused(tmp_path):
    result = run_ranks(2, [*PROGRAM, *SHORT, *TEXT], LIMIT, environment(NOWHERE), tmp_path)
    block_of(result, 69, "unset MPI4PY_LIBMPI, or load your cluster's MPI")
    assert WARNING not in result.stderr
    assert not (tmp_path / "runs").exists()
