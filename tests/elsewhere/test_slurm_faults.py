"""slurm/train.sbatch on real SLURM when a job is stopped, loses a node, or is one of several."""

import functools
import sys
import time

import pytest
from fault_table import fault
from helpers import REPOSITORY, processes_with
from program import metrics, mpipar
from slurm_cluster import (
    CUT_REQUEST,
    FINAL_STATES,
    MOST_STARTS,
    job_output,
    kill_node,
    slurm_cluster,
    start_node,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(480)]

LIMIT = 150.0  # seconds from the submission of a job to its end
STEPS = 40  # two seconds each at the first start
RUN = f"""--pp 2 --layers 2 --d-model 16 --heads 2 --seq-len 16 --batch-size 4 --num-microbatches 2
    --steps {STEPS} --sample-tokens 0 --data text.txt""".split()
# At its first start a job is so slow that it meets whatever a test has for it.
WRAPPER = f"""#!/bin/sh
export PYTHONPATH={REPOSITORY}
exec {sys.executable} {REPOSITORY}/tests/faulty_run.py slow-first-start "$@"
"""


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as running:
        yield running


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


@fault(27, "SIGUSR1 by scancel --signal, to the tasks of a SLURM job array", 75)
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


@fault(27, "SIGUSR1 before SLURM's time limit", 75)
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


@fault(28, "SIGTERM by scontrol requeue, under SLURM", 75)
def test_a_job_that_slurm_requeues_goes_on(cluster, with_job, weights):
    def body(job):
        job.wait_for_steps()
        cluster.run("scontrol", "requeue", str(job.id))
        job.assert_whole(weights(1))

    with_job(body)


@fault(25, "a node of SLURM is lost: its daemons and ranks are killed", 0)
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


@fault(28, "SIGTERM by scancel, under SLURM", 75)
def test_a_cancelled_job_saves_and_is_not_queued_again(cluster, with_job):
    def body(job):
        job.wait_for_steps()
        cluster.run("scancel", str(job.id))
        job.wait_until(lambda: not processes_with("SLURM_JOB_ID", str(job.id)))
        job.wait_until(lambda: job.state() != "COMPLETING")
        assert job.state() == "CANCELLED", job.output()
        assert any((job.folder / "checkpoints").glob("step-*[0-9]")), job.output()

    with_job(body)
