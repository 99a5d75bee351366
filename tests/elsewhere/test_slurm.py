"""On real SLURM: slurm/*.sbatch through sbatch and srun, on two nodes that share this host."""

import functools
import json
import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
from helpers import REPOSITORY, processes_with
from program import metrics, mpipar
from slurm_cluster import (
    CUT_REQUEST,
    FINAL_STATES,
    MOST_STARTS,
    SlurmCluster,
    job_output,
    kill_node,
    slurm_cluster,
    start_node,
)

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


@pytest.mark.parametrize(
    ("venv", "flags", "code", "said"),
    [
        (sys.prefix, ["--tp", "3"], 2, "exit code 2 "),
        ("/nowhere", [], 69, "MPIPAR_VENV"),
        pytest.param(  # it does not speak PMI-2: each process believes that it is alone
            OPENMPI_VENV,
            [],
            69,
            "--mpi=pmix",
            marks=pytest.mark.skipif(
                not OPENMPI_VENV, reason="MPIPAR_OPENMPI_VENV names no Open MPI environment"
            ),
        ),
    ],
    ids=["layout", "no environment", "Open MPI"],
)
def test_code_and_words_of_a_refusal_arrive(venv, flags, code, said, cluster, tmp_path):
    result = submit(cluster, tmp_path, venv, *flags, "--out", f"{tmp_path}/run")
    assert (result.state, result.exit_code) == ("FAILED", code), result.output
    assert said in result.output, result.output
    assert not (tmp_path / "run").exists()


# --- slurm/train.sbatch on real SLURM when a job is stopped, loses a node, or is one of several


LIMIT = 150.0  # seconds from the submission of a job to its end
STEPS = 40  # two seconds each at the first start
RUN = f"""--pp 2 --layers 2 --d-model 16 --heads 2 --seq-len 16 --batch-size 4 --num-microbatches 2
    --steps {STEPS} --sample-tokens 0 --data text.txt""".split()
# At its first start a job is so slow that it meets whatever a test has for it.
WRAPPER = f"""#!/bin/sh
export PYTHONPATH={REPOSITORY}
exec {sys.executable} {REPOSITORY}/tests/helpers/faulty_run.py slow-first-start "$@"
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A function: seed -> the weights of a run that nothing interrupts, without SLURM."""

    @functools.cache
    def run(seed):
        folder = tmp_path_factory.mktemp("whole")
        write_text(folder)
        mpipar("train", *RUN, "--seed", seed, "--out", "run", ranks=2, cwd=folder).ended()
        return weights_in(folder / "run")

    return run


@pytest.fixture
def here(tmp_path):
    """A folder to type sbatch in, with the scripts of this repository."""
    (tmp_path / "slurm").symlink_to(REPOSITORY / "slurm")
    program = tmp_path / "venv" / "bin" / "mpipar"
    program.parent.mkdir(parents=True)
    program.write_text(WRAPPER)
    program.chmod(0o755)
    write_text(tmp_path)
    return tmp_path


def write_text(folder):
    (folder / "text.txt").write_text("the cat sat on the mat and a dog ran to the barn. " * 40)


def weights_in(folder):
    return (folder / "weights" / "model.safetensors").read_bytes()


class CutRequestError(Exception):
    """SLURM has cut a request of MPI_Init: the job shows nothing, and has to be submitted again."""


class Job:
    """A job of train.sbatch on two nodes with a rank each, or a task of a job array."""

    def __init__(self, cluster, here, job_id):
        self.cluster, self.here, self.id = cluster, here, job_id
        self.folder = here / "runs" / f"job-{job_id}"

    def fields(self):
        return self.cluster.job_fields(self.id)

    def state(self):
        return self.fields()["JobState"]

    def output(self):
        return job_output(self.fields())

    def task(self, number):
        return Job(self.cluster, self.here, f"{self.id}_{number}")

    def wait_until(self, reached):
        deadline = time.monotonic() + LIMIT
        while not reached():
            if CUT_REQUEST in self.output():
                raise CutRequestError
            assert time.monotonic() < deadline, f"{self.fields()}\n{self.output()}"
            time.sleep(0.1)

    def wait_for_steps(self):
        path = self.folder / "metrics.jsonl"
        self.wait_until(lambda: path.exists() and path.read_text().count("\n") > 0)

    def signal(self, name):
        self.cluster.run("scancel", f"--signal={name}", str(self.id))

    def assert_whole(self, expected):
        """The second start ends the run, which is the same as one that nothing has interrupted."""
        self.wait_until(lambda: self.state() in FINAL_STATES)
        fields = self.fields()
        assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), self.output()
        assert weights_in(self.folder) == expected, self.output()
        assert [line["step"] for line in metrics(self.folder)] == list(range(1, STEPS + 1))


@pytest.fixture
def with_job(cluster, here):
    """A function that submits a job and runs the test's body with it, again if SLURM cut it off."""

    def run(body, *flags, seed="1"):
        for _ in range(MOST_STARTS):
            job = Job(
                cluster,
                here,
                cluster.submit(
                    "--nodes=2",
                    "--ntasks-per-node=1",
                    f"--output={here}/%j-%a.log",
                    *flags,
                    "slurm/train.sbatch",
                    *RUN,
                    "--seed",
                    seed,
                    cwd=here,
                    env={"MPIPAR_VENV": str(here / "venv")},
                ),
            )
            try:
                return body(job)
            except CutRequestError:
                cluster.run("scancel", "--signal=KILL", "--full", str(job.id))
        raise AssertionError(f"{CUT_REQUEST}, {MOST_STARTS} times")

    return run


@pytest.mark.fault
def test_tasks_of_an_array_that_are_asked_to_stop_go_on_later(with_job, weights):
    """Each task has a run of its own."""

    def body(job):
        tasks = [job.task(number) for number in (1, 2)]
        for task in tasks:
            task.wait_for_steps()
            task.signal("USR1")
        for task, seed in zip(tasks, (1, 2), strict=True):
            task.assert_whole(weights(seed))
            assert "stopped and saved" in task.output()

    with_job(body, "--array=1-2", seed="%a")


@pytest.mark.fault
def test_a_job_goes_on_after_its_time_limit(cluster, with_job, weights):
    def body(job):
        def set_limit(minutes):
            cluster.run("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}")

        job.wait_for_steps()
        set_limit(2)  # SLURM looks every 30 s: at its next look, less is left than the warning asks
        job.wait_until(lambda: job.fields()["Restarts"] == "1")
        set_limit(10)
        job.assert_whole(weights(1))
        assert "stopped and saved" in job.output()

    with_job(body, "--time=10", "--signal=USR1@120")


@pytest.mark.fault
def test_a_job_that_slurm_requeues_goes_on(cluster, with_job, weights):
    def body(job):
        job.wait_for_steps()
        cluster.run("scontrol", "requeue", str(job.id))
        job.assert_whole(weights(1))

    with_job(body)


@pytest.mark.fault
def test_a_job_goes_on_after_a_lost_node(cluster, with_job, weights):
    def body(job):
        job.wait_for_steps()
        job.signal("USR2")
        job.wait_until(lambda: any((job.folder / "checkpoints").glob("step-*[0-9]")))
        kill_node(cluster, "n2")
        try:
            job.wait_until(lambda: job.state() == "PENDING")
        finally:
            start_node(cluster, "n2")
        job.assert_whole(weights(1))

    with_job(body)


@pytest.mark.fault
def test_a_cancelled_job_saves_and_is_not_queued_again(cluster, with_job):
    def body(job):
        job.wait_for_steps()
        cluster.run("scancel", str(job.id))
        job.wait_until(lambda: not processes_with("SLURM_JOB_ID", str(job.id)))
        job.wait_until(lambda: job.state() != "COMPLETING")
        assert job.state() == "CANCELLED", job.output()
        assert any((job.folder / "checkpoints").glob("step-*[0-9]")), job.output()

    with_job(body)
