"""One process works where no MPI library can be loaded; several ranks are refused with a cure."""

import json
import re

import numpy as np
import pytest
from helpers import REPOSITORY, run_command, run_ranks
from program import (
    BLOCK,
    LIMIT,
    PROGRAM,
    TEXT,
    block_of,
    environment,
    metrics,
    mpipar,
    one_block,
    weights,
)

from mpipar.run.process.one_rank import OneRank

NOWHERE = {"MPI4PY_LIBMPI": "/nowhere"}
WARNING = "mpipar: warning: MPI cannot be loaded ("
SIZES = "--layers 2 --d-model 16 --heads 2 --seq-len 16 --batch-size 4".split()
TRAIN = ("train", *SIZES, *TEXT, "--steps", "3", "--sample-tokens", "0")
EXPLAIN = "explain --layout dp=2,tp=2 --num-microbatches 2"
STEP = (
    "--layers 1 --d-model 16 --heads 2 --seq-len 8 --batch-size 2 --repeats 1"
    " --no-compiled --sides own --json step.json"
)


@pytest.fixture
def nothing_installed(tmp_path):
    """The environment of a process whose mpi4py has no module MPI."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['mpi4py.MPI'] = None\n")
    return {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}


def alone(*words, env=NOWHERE, cwd):
    """Run a command that must end well, after one warning; return how it ended."""
    result = mpipar(*words, env=env, cwd=cwd).ended()
    assert result.stderr.count(WARNING) == 1, result.tail()
    assert result.stderr.count("\n") == 1, result.tail()
    return result


def test_training_computes_what_it_computes_with_a_library(tmp_path):
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    with_mpi = mpipar(*TRAIN, cwd=tmp_path / "with").ended()
    assert with_mpi.stderr == ""
    alone(*TRAIN, "--trace", "1:2", "--check-comm", cwd=tmp_path / "without")
    one, other = (tmp_path / name / "runs" / "0001" for name in ("with", "without"))
    assert [line["loss"] for line in metrics(one)] == [line["loss"] for line in metrics(other)]
    wanted, got = weights(one), weights(other)
    assert wanted.keys() == got.keys()
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)

    result = alone("train", "--resume", "runs/0001", "--steps", "4", cwd=tmp_path / "without")
    assert "resumed after step 3" in result.stdout
    result = alone(
        "generate",
        "runs/0001",
        "--prompt",
        "The ",
        "--sample-tokens",
        "4",
        cwd=tmp_path / "without",
    )
    assert result.stdout.strip()


def test_verify_compares_and_doctor_says_that_there_is_no_library(tmp_path):
    assert " ok" in alone("verify", *SIZES, cwd=tmp_path).stdout
    text = alone("doctor", cwd=tmp_path).stdout
    assert " ".join(text.split()).count("MPI library none launcher none (one process)") == 1


def test_a_library_that_is_not_installed_is_one_that_cannot_be_loaded(tmp_path, nothing_installed):
    result = alone(*TRAIN, env=nothing_installed, cwd=tmp_path)
    # the second cure is that of a system with Debian's MPICH
    assert re.search(r"install one with pip install '.\[mpich\]'|its mpiexec", result.stderr)
    assert "held-out loss" in result.stdout


def test_what_needs_no_mpi_does_not_miss_it(tmp_path):
    result = mpipar(*EXPLAIN.split(), env=NOWHERE, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, ""), result.tail()


@pytest.mark.parametrize(
    "bench",
    [
        f"step {STEP}",
        "tiles --rows 16 --width 8 --seq-len 8 --heads 1 --repeats 1",
        "matmul --tokens 8 --inner 8 --outer 8 --repeats 1",
    ],
)
def test_benchmarks_measure_one_rank(bench, tmp_path):
    name, *words = bench.split()
    result = run_command(
        [PROGRAM[0], "-m", f"bench.{name}", *words], LIMIT, environment(NOWHERE), tmp_path
    ).ended()
    assert "Traceback" not in result.stderr
    if name == "step":
        assert json.loads((tmp_path / "step.json").read_text())["machine"]["ranks"] == 1


def test_a_failure_still_ends_with_one_block(tmp_path):
    result = mpipar(*TRAIN, "--nonsense", env=NOWHERE, cwd=tmp_path)
    code, block = one_block(result)
    assert (code, "--nonsense: unknown flag" in block) == (2, True)
    (tmp_path / "text.txt").write_text("short")
    result = mpipar("train", *SIZES, "--data", "text.txt", env=NOWHERE, cwd=tmp_path)
    code, block = one_block(result)
    assert (code, "the data has 5 tokens" in block) == (65, True)


def test_several_ranks_are_refused(tmp_path):
    result = run_ranks(2, [*PROGRAM, *TRAIN], LIMIT, environment(NOWHERE), tmp_path)
    block_of(result, 69, "unset MPI4PY_LIBMPI, or load your cluster's MPI")
    assert WARNING not in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_launcher_of_one_rank_gets_one(tmp_path):
    variables = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    result = alone("doctor", env=NOWHERE | variables, cwd=tmp_path)
    assert "MPICH's mpiexec" in result.stdout
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
