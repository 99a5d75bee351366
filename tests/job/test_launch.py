"""If a rank ends, the job ends at once, with one block, one exit code and no process left."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_table import fault
from helpers import OVERSUBSCRIBED, REPOSITORY, find_launcher, launcher, run_command, run_ranks
from program import BLOCK, PROGRAM, block_of, killed_by, mpipar, one_block, pair, running

JOB = [sys.executable, str(REPOSITORY / "tests" / "helpers" / "launch_job.py")]
LIMIT = 60.0  # for the whole command, start under load included


@pytest.fixture(autouse=True)
def clean_environment(no_launcher, monkeypatch, tmp_path):
    """The test has its own error folders, too."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup has started the tests
    yield
    signal.signal(signal.SIGHUP, before)


def launch(num_ranks, *argv):
    """Run the job under mpiexec; one that does not end fails the test."""
    return run_ranks(num_ranks, [*JOB, *argv], LIMIT)


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("exit-0", 70, ["sys.exit(0)", "rank 1 of 3"]),
        ("user-error", 74, ["disk full", "rank 1 of 3", "step 17"]),
        pytest.param(
            "thread",
            70,
            ["ValueError: a defect", "rank 1 of 3", "thread helper"],
            marks=fault(26, "an exception in a helper thread", 70),
        ),
        pytest.param(
            "single-threaded",
            70,
            ["ValueError: a defect", "rank 1", "thread helper"],
            marks=fault(38, "MPI without MPI_THREAD_MULTIPLE", 70),
        ),
        ("early-exception", 70, ["ValueError: a defect", "rank 1 of 3"]),
    ],
)
def test_failure_on_one_rank_ends_the_job(how, code, words):
    result = launch(3, how)
    block_of(result, code, *words)
    assert ("Traceback" in result.stderr) == (code == 70), result.tail()


def test_failing_rank_leaves_a_record_in_the_run_folder(tmp_path):
    result = launch(3, "exception", str(tmp_path))
    block_of(result, 70, "ValueError: a defect", "rank 1 of 3", "step 17", "launch_job.py")
    record = tmp_path / "errors" / "rank-1.json"
    assert str(record) in result.stderr
    content = json.loads(record.read_text())
    assert content["exit_code"] == 70
    assert content["what"] == ["ValueError: a defect"]
    assert "launch_job.py" in content["trace"]
    assert [path.name for path in record.parent.iterdir()] == ["rank-1.json"]
    assert list((tmp_path / "tmp").glob("mpipar*")) == []


def test_two_ranks_failing_differently_at_once_give_one_code(tmp_path):
    code, block = one_block(launch(4, "two", str(tmp_path)))
    assert code in (70, 74)
    assert ("rank 1 of 4" if code == 74 else "rank 2 of 4") in block


def test_a_launcher_that_kills_late_gives_no_rank_time_for_a_second_block(tmp_path):
    assert launch(4, "slow-launcher").returncode == 74
    assert (tmp_path / "tmp" / "said").read_text().count(BLOCK) == 1
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["said"]


@pytest.mark.parametrize(
    ("how", "code", "words", "absent"),
    [
        ("agree-one", 65, ["missing", "rank 1 of 3"], "Abort("),
        ("agree-all", 65, ["missing", "empty"], "rank "),
        ("early-usage", 2, ["--x: unknown flag", "--y: wrong"], "rank "),
    ],
)
def test_mistake_of_the_user_is_told_once_and_needs_no_abort(how, code, words, absent):
    result = launch(3, how)
    block = block_of(result, code, *words)
    assert absent not in block, result.tail()
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("how", "ranks", "code"),
    [
        ("agree", 3, 0),
        ("ranks-leave-with-different-codes", 3, 1),
        ("alone", 3, 0),  # what one rank does at the end keeps no other waiting
        ("reporting-fails", 3, 70),
        ("unheard", 2, 70),
    ],
)  # a failure that cannot be told
def test_ends_without_a_block(how, ranks, code):
    assert launch(ranks, how).returncode == code


def test_what_ends_every_rank_is_told_once():
    block_of(launch(4, "all"), 70)


def test_the_launcher_says_which_signal_has_killed_a_rank():
    killed_by(launch(3, "segv"), signal.SIGSEGV)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_library_that_calls_exit_is_reported(ranks):
    block_of(launch(ranks, "leave"), 70, "a library called exit()")


def test_a_library_that_exits_while_it_starts_is_reported_with_what_may_differ():
    block = block_of(launch(2, "leave-in-start"), 69, "a library called exit()", "MPI is starting")
    assert "the same on all ranks? here: " in block
    assert "MPIR_CVAR_POLLS_BEFORE_YIELD=1" in block, "as the tests set it"


# --- Ctrl-C


@contextlib.contextmanager
def up(num_ranks, how, folder):
    """The job in the background, all ranks up: (the job, ids of the ranks)."""
    files = [folder / f"up-{rank}" for rank in range(num_ranks)]
    with running([*JOB, how, folder], folder, num_ranks) as job:
        job.wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        if how != "stop":
            time.sleep(0.3)  # now they wait inside MPI
        yield job, [int(file.read_text()) for file in files]


def is_hydra():
    """Whether the launcher is Hydra; Open MPI's answers Ctrl-C itself and has its own exit code."""
    version = subprocess.run(
        [find_launcher(), "--version"], capture_output=True, text=True, check=False
    )
    return "HYDRA" in version.stdout


needs_hydra = pytest.mark.skipif(
    find_launcher() is None or not is_hydra(), reason="the launcher is not MPICH's"
)


@pytest.mark.parametrize(
    ("target", "sign"),
    [("launcher", signal.SIGINT), ("rank", signal.SIGTERM)],
)
def test_a_signal_before_any_step_ends_the_job(target, sign, tmp_path):
    """It also holds while a rank waits in MPI."""
    with up(3, "busy", tmp_path) as (job, ranks):
        os.kill(job.process.pid if target == "launcher" else ranks[1], sign)
        code, text = job.end(), job.output()
    if target == "rank" or is_hydra():
        assert code == 130, text
        assert text.count(BLOCK) == 1, text
        assert f"interrupted ({sign.name})" in text
    else:
        assert code != 0


@needs_hydra
@pytest.mark.parametrize(
    ("target", "sign"),
    [("launcher", signal.SIGTERM), ("rank", signal.SIGINT), ("rank", signal.SIGUSR1)],
)
def test_a_signal_in_a_loop_stops_all_ranks_at_the_same_step(target, sign, tmp_path):
    with up(3, "stop", tmp_path) as (job, ranks):
        os.kill(job.process.pid if target == "launcher" else ranks[1], sign)
        code, text = job.end(), job.output()
    assert code == 75, text
    steps = re.findall(r"left at step (\d+)", text)
    assert len(steps) == 3
    assert len(set(steps)) == 1
    assert BLOCK not in text
    assert text.count(f"{sign.name}: stops after this step") == (target == "launcher")


@fault(29, "Ctrl-C twice", 130)
def test_only_a_second_ctrl_c_does_not_wait(tmp_path):
    """SLURM sends SIGTERM to a job that already saves because of SIGUSR1."""
    with up(2, "stuck", tmp_path) as (job, ranks):
        for sign in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(ranks[1], sign)
            while is_pending(ranks[1], sign):  # two of one kind at once are one
                time.sleep(0.02)
        time.sleep(0.3)
        assert job.process.poll() is None, job.output()
        os.kill(ranks[1], signal.SIGINT)
        assert job.end() == 130
        (line,) = [line for line in job.output().splitlines() if BLOCK in line]
    assert "interrupted twice (SIGINT), rank 1 of 2" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "busy",
        pytest.param(
            "computing",
            marks=[
                pytest.mark.slow,
                fault(34, "kill -9 of the launcher and its daemon while ranks compute", None),
            ],
        ),
    ],
)
def test_ranks_whose_launcher_was_killed_end(how, tmp_path):
    """Hydra's proxy ends them; so does Open MPI for ranks that communicate, but not for others."""
    with up(2, how, tmp_path) as (job, ranks):
        for pid in {job.process.pid, *map(parent_of, ranks)}:
            os.kill(pid, signal.SIGKILL)
        job.end()


def is_pending(pid, sign):
    """Whether a process has not yet begun to act on a signal that it got."""
    pending = re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(pending, 16) >> sign - 1 & 1)


def parent_of(pid):
    return int(re.search(r"PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


# --- alone


def alone(**variables):
    """`mpipar doctor` as a single process with these variables of a launcher."""
    return mpipar("doctor", env=variables)


@fault(38, "srun that does not speak the library's PMI", 69)
def test_one_of_many_that_finds_itself_alone_stops():
    result = alone(SLURM_STEP_NUM_TASKS="4", SLURM_NTASKS="4", SLURM_PROCID="0", SLURM_LOCALID="0")
    block_of(result, 69, "alone", "srun started 4", "--mpi=pmi2", "--mpi=pmix")
    assert "RuntimeWarning" not in result.stderr


@pytest.mark.slow
def test_only_one_of_them_tells():
    variables = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    result = alone(**variables, SLURM_STEP_TASKS_PER_NODE="2").ended(69)
    assert result.stderr == ""


def test_one_process_in_a_batch_script_is_fine():
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NPROCS": "4"}
    alone(**batch).ended()


@fault(35, "a launcher of another MPI library", 69)
@pytest.mark.skipif(
    not os.environ.get("MPIPAR_OPENMPI_VENV") or find_launcher() is None,
    reason="MPIPAR_OPENMPI_VENV names no Open MPI environment",
)
def test_open_mpi_under_mpich_s_launcher_and_the_reverse():
    other = Path(os.environ["MPIPAR_OPENMPI_VENV"]) / "bin"
    job = ["-n", "2"]
    mixed = [
        [launcher(), *job, other / "python", "-m", "mpipar", "doctor"],
        [other / "mpiexec", *job, sys.executable, "-m", "mpipar", "doctor"],
    ]
    for command in mixed:
        result = run_command(command, LIMIT, OVERSUBSCRIBED)
        assert one_block(result)[0] == 69, result.tail()
        assert "Open MPI" in result.stderr
        assert "RuntimeWarning" not in result.stderr


# --- before MPI, and ranks that differ


def test_a_rank_whose_mpi_cannot_be_loaded_ends_the_others(tmp_path):
    """The others wait for it in MPI_Init."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '1':\n"
        "    sys.modules['mpi4py.MPI'] = None\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    result = run_ranks(3, [*PROGRAM, "doctor"], LIMIT, env)
    block_of(result, 69, "MPI cannot be loaded", "rank 1 of 3")
    assert list((tmp_path / "tmp").iterdir()) == []


SMALL = (
    "train --layers 2 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --sample-tokens 0"
    " --num-microbatches 2 --steps 2 --layout tp=2 --data text.txt"
).split()


@fault(5, "ranks with other flags", 69)
@pytest.mark.parametrize(("first", "second", "rows"), [
    ([*SMALL, "--seed", "1"], [*SMALL, "--seed", "2", "--lr", "0.1"],
     ["--seed 0 1", "--seed 1 2", "--lr 0 0.003", "--lr 1 0.1"]),
    (SMALL, [*SMALL, "--sede", "2"], ["refused 0 nothing", "refused 1 --sede: unknown flag"]),
    (SMALL, ["doctor"], ["command 0 train", "command 1 doctor"]),
])  # fmt: skip
def test_ranks_that_differ_end_before_the_first_step(first, second, rows, text_folder):
    result = pair(first, second, [text_folder] * 2)
    block = block_of(result, 69)
    text = [" ".join(line.split()) for line in block.splitlines()]
    for row in rows:
        assert any(line.startswith(row) for line in text), result.tail()
    assert not (text_folder / "runs").exists()


# --- what a job leaves behind

NAMES_LEFT = """
import os, re, sys
from mpipar.run.process.session import guard
def main(argv, session):
    session.start().Barrier()
    with open("/proc/self/maps") as maps:
        mapped = set(re.findall("/dev/shm/mpich_shm_.*", maps.read()))
    named = [path for path in mapped if os.path.exists(path)]
    # In one piece, because another rank writes beside it.
    sys.stdout.write(f"mapped {len(mapped)} named {len(named)}\\n")
    return 0
guard(main, [])
"""


@needs_hydra
def test_mpich_s_shared_memory_has_no_name_that_a_killed_job_could_leave():
    result = run_ranks(2, [sys.executable, "-c", NAMES_LEFT], LIMIT).ended()
    assert result.stdout.count("mapped 1 named 0") == 2, result.tail()
