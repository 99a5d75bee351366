"""On real SLURM: slurm/*.sbatch through sbatch and srun, on two nodes that share this host."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY
from slurm_cluster import CUT_REQUEST, SlurmCluster, slurm_cluster

from mpipar.interconnect import files

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(480)]

TINY = (
    "--steps 4 --log-interval 2 --layers 2 --d-model 16 --heads 2 --seq-len 16 --batch-size 4"
    " --num-microbatches 2 --sample-tokens 8"
).split()
OPENMPI_VENV = os.environ.get("MPIPAR_OPENMPI_VENV")


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as running:
        yield running


def submit(cluster: SlurmCluster, folder: Path, venv: str, *flags: str):
    """Type the README's command for SLURM, flags added, and wait: 2 nodes with 2 ranks each."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^.*&& sbatch slurm/train\.sbatch.*$", readme, re.MULTILINE)

    def typed():
        result = cluster.run(
            *("bash", "-euc", f"{command} {shlex.join([*TINY, *flags])}"),
            cwd=REPOSITORY,
            env={"MPIPAR_VENV": venv, "SBATCH_OUTPUT": f"{folder}/job.log"},
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return int(result.stdout.removeprefix("Submitted batch job "))

    return cluster.finish(typed, timeout=120.0)


def test_ranks_see_each_other_across_nodes(cluster, tmp_path):
    program = (
        "import os; from mpi4py import MPI; w = MPI.COMM_WORLD\n"
        "nodes = w.gather(os.environ['SLURMD_NODENAME'])\n"
        "if w.rank == 0: print(w.size, *nodes)"
    )
    step = ["srun", "--mpi=pmi2", sys.executable, "-c", program]
    result = cluster.finish(
        lambda: cluster.submit(
            "--nodes=2",
            "--ntasks-per-node=2",
            f"--output={tmp_path}/job.log",
            "--wrap",
            shlex.join(step),
            cwd=tmp_path,
        ),
        timeout=60.0,
    )
    assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
    assert result.output.split() == ["4", "n1", "n1", "n2", "n2"]


@pytest.mark.parametrize("then", ["sleep 60", "exit 143"])
def test_a_job_that_slurm_cut_off_is_started_again(cluster, tmp_path, then):
    first = f"mkdir {tmp_path}/once && echo 'slurmstepd-n1: error: {CUT_REQUEST}' && {then}"
    result = cluster.finish(
        lambda: cluster.submit(
            f"--output={tmp_path}/job.log", "--wrap", f"{first} || echo done", cwd=tmp_path
        ),
        timeout=60.0,
    )
    assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
    assert result.output.endswith("done\n")


def test_interconnect_script(cluster, tmp_path):
    path = tmp_path / "rows.jsonl"
    result = cluster.finish(
        lambda: cluster.submit(
            "--nodes=2",
            "--ntasks-per-node=1",
            f"--output={tmp_path}/job.log",
            "slurm/interconnect.sbatch",
            "all-reduce",
            "latency",
            "--begin-bytes",
            "64",
            "--end-bytes",
            "64",
            "-n",
            "20",
            "--launches",
            "2",
            "--json",
            str(path),
            cwd=REPOSITORY,
            env={"MPIPAR_VENV": sys.prefix},
        ),
        timeout=180.0,
    )
    assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
    runs = files.read(str(path))
    assert [run.head["launch"] for run in runs] == [1, 2]
    for run in runs:
        assert (run.head["launcher"], run.head["ranks"]) == ("srun", 2)
        assert {place["host"] for place in run.head["places"]} == {"n1", "n2"}
        assert {row["link"] for row in run.rows} == {"between nodes"}


@pytest.mark.slow
def test_train_script(cluster, tmp_path):
    flags = ["--layout", "pp=2,tp=2", "--out", f"{tmp_path}/run"]
    result = submit(cluster, tmp_path, sys.prefix, *flags)
    assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "weights" / "model.safetensors").stat().st_size > 0
    assert "4 ranks on 2 hosts" in result.output, result.output


def test_exit_code_of_a_user_error_arrives(cluster, tmp_path):
    result = submit(cluster, tmp_path, sys.prefix, "--tp", "3", "--out", f"{tmp_path}/run")
    assert (result.state, result.exit_code) == ("FAILED", 2), result.output
    assert not (tmp_path / "run").exists()


def test_code_of_the_failing_rank_arrives(cluster, tmp_path):
    """srun alone would answer 143, the code of the ranks that it kills."""
    fake = tmp_path / "venv" / "bin" / "mpipar"
    fake.parent.mkdir(parents=True)
    fake.write_text(
        "#!/bin/sh\n"
        '[ "$SLURM_PROCID" = 1 ] || exec sleep 60\n'
        'echo 70 > "$MPIPAR_EXIT_FILE"\n'
        "exit 70\n"
    )
    fake.chmod(0o755)
    result = submit(cluster, tmp_path, f"{tmp_path}/venv")
    assert (result.state, result.exit_code) == ("FAILED", 70), result.output
    assert not list(REPOSITORY.glob(".mpipar-exit-*"))


def test_missing_environment_is_named(cluster, tmp_path):
    result = submit(cluster, tmp_path, f"{tmp_path}/nothing")
    assert (result.state, result.exit_code) == ("FAILED", 69), result.output
    assert "MPIPAR_VENV" in result.output


def test_submitted_from_elsewhere(cluster, tmp_path):
    result = cluster.finish(
        lambda: cluster.submit(
            f"--output={tmp_path}/job.log", str(REPOSITORY / "slurm" / "train.sbatch"), cwd=tmp_path
        ),
        timeout=60.0,
    )
    assert (result.state, result.exit_code) == ("FAILED", 2), result.output
    assert "from the top of the repository" in result.output


@pytest.mark.slow
@pytest.mark.skipif(not OPENMPI_VENV, reason="MPIPAR_OPENMPI_VENV names no Open MPI environment")
def test_open_mpi_under_pmi2_is_caught(cluster, tmp_path):
    """Open MPI does not speak PMI-2: each of the four processes believes that it is alone."""
    result = submit(cluster, tmp_path, OPENMPI_VENV, "--out", f"{tmp_path}/run")
    assert (result.state, result.exit_code) == ("FAILED", 69), result.output
    assert "--mpi=pmix" in result.output, result.output
    assert not (tmp_path / "run").exists()
