"""If a rank ends, the job ends at once, with one block, one exit code and no process left."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import OVERSUBSCRIBED, REPOSITORY, find_launcher, launcher, run_command, run_ranks
from in_process import alone
from program import (
    BLOCK,
    FAULTY,
    PROGRAM,
    block_of,
    environment,
    killed_by,
    metrics,
    mpipar,
    one_block,
    pair,
    running,
    weights,
)

from mpipar.run.checkpoint.manifest import committed_steps
from mpipar.run.process.signals import Interruptible, obeyed

JOB = [sys.executable, str(REPOSITORY / "tests" / "helpers" / "launch_job.py")]
LIMIT = 60.0  # for the whole command, start under load included


@pytest.fixture(autouse=True)
def clean_environment(no_launcher, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup has started the tests
    yield
    signal.signal(signal.SIGHUP, before)


def launch(num_ranks, *argv):
    """Run the job under mpiexec; one that does not end fails the test."""
    return run_ranks(num_ranks, [*JOB, *argv], LIMIT)


DEFECT, THREAD = ["ValueError: a defect", "rank 1 of 3", "Traceback"], "thread helper"
EXIT = "a library called exit()"
SLOW = pytest.mark.slow
SAID = [  # how, ranks, exit code, what is said, what is not
    ("exception", 3, 70, [*DEFECT, "step 17", "launch_job.py"], "no such"),
    ("exit-0", 3, 70, ["sys.exit(0)", "rank 1 of 3"], "no such"),
    ("user-error", 3, 74, ["disk full", "rank 1 of 3", "step 17"], "Traceback"),
    pytest.param("thread", 3, 70, [*DEFECT, THREAD], "no such",
                 marks=pytest.mark.fault),
    pytest.param("single-threaded", 3, 70, ["ValueError: a defect", THREAD], "no such",
                 marks=[SLOW, pytest.mark.fault]),
    ("early-exception", 3, 70, DEFECT, "no such"),
    ("all", 4, 70, ["ValueError: a defect"], "no such"),
    ("agree-one", 3, 65, ["missing", "rank 1 of 3"], "Abort("),
    pytest.param("agree-all", 3, 65, ["missing", "empty"], "rank ", marks=SLOW),
    ("early-usage", 3, 2, ["--x: unknown flag", "--y: wrong"], "rank "),
    ("leave", 3, 70, [EXIT], "no such"),
    pytest.param("leave", 1, 70, [EXIT], "no such", marks=SLOW),
    ("leave-in-start", 2, 69, [EXIT, "the same on all ranks?"], "no such"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "ranks", "code", "said", "absent"), SAID)
def test_the_job_ends_with_one_block(how, ranks, code, said, absent):
    block = block_of(launch(ranks, how), code, *said)
    assert absent not in block


def test_two_ranks_failing_differently_at_once_give_one_code(tmp_path):
    code, block = one_block(launch(4, "two", str(tmp_path)))
    assert code in (70, 74)
    assert ("rank 1 of 4" if code == 74 else "rank 2 of 4") in block


@pytest.mark.parametrize(
    ("how", "ranks", "code"),
    [
        ("agree", 3, 1),  # the code of rank 2
        ("alone", 3, 0),  # what one rank does at the end keeps no other waiting
        ("reporting-fails", 3, 70),
        pytest.param("unheard", 2, 70, marks=pytest.mark.slow),  # a failure that cannot be told
    ],
)
def test_ends_without_a_block(how, ranks, code):
    assert launch(ranks, how).returncode == code


def test_the_launcher_says_which_signal_has_killed_a_rank():
    killed_by(launch(3, "segv"), signal.SIGSEGV)


# --- Ctrl-C


@contextlib.contextmanager
def up(num_ranks, how, folder):
    """The job in the background, all ranks up: (the job, ids of the ranks)."""
    files = [folder / f"up-{rank}" for rank in range(num_ranks)]
    with running([*JOB, how, folder], folder, num_ranks) as job:
        job.wait_until(lambda: all(file.exists() and file.read_text() for file in files))
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
    [("launcher", signal.SIGINT), pytest.param("rank", signal.SIGTERM, marks=pytest.mark.slow)],
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


@pytest.mark.fault
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
    ["busy", pytest.param("computing", marks=pytest.mark.fault)],
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


# --- signals to `mpipar train`: the weights are saved, and all ranks end together


QUICK = 30.0  # seconds from Ctrl-C to the end of all processes: a second, and much for the load
TINY = """train --data text.txt --layers 2 --d-model 9 --heads 3 --ffn 12 --seq-len 5
    --batch-size 6 --num-microbatches 2 --log-interval 3 --out run""".split()


def training(folder, ranks, *words, program=PROGRAM):
    return running([*program, *TINY, *words], folder, ranks)


@pytest.mark.parametrize(
    ("ranks", "sign"),
    [
        (3, signal.SIGTERM),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.slow),
        (1, signal.SIGHUP),
        pytest.param(2, signal.SIGUSR1, marks=pytest.mark.fault),
    ],
)
def test_in_training_the_run_ends_with_its_weights(ranks, sign, text_folder):
    path = text_folder / "run" / "metrics.jsonl"
    with training(text_folder, ranks, "--steps", "1000000") as job:
        job.wait_until(lambda: path.exists() and path.read_text().count("\n") > 5)
        assert job.interrupt(sign, QUICK) == 75, job.output()
        text = job.output()
    assert BLOCK not in text
    assert text.count(f"{sign.name}: stops after this step") == 1
    last = re.search(r"stopped on request after step (\d+); checkpoint and weights", text)
    assert metrics(text_folder / "run")[-1]["step"] == int(last[1])
    assert all(np.isfinite(x).all() for x in weights(text_folder / "run").values())
    result = alone("generate", "run", "--prompt", "a", "--sample-tokens", "3", cwd=text_folder)
    assert result.returncode == 0, result.tail()


def test_sigusr2_to_one_rank_saves_and_the_run_goes_on(text_folder):
    path, saved = text_folder / "run" / "metrics.jsonl", text_folder / "run" / "checkpoints"
    with training(text_folder, 2, "--steps", "1000000") as job:
        job.wait_until(lambda: path.exists() and path.read_text().count("\n") > 5)
        os.kill(job.a_rank(), signal.SIGUSR2)
        job.wait_until(lambda: committed_steps(saved))
        steps = path.read_text().count("\n")
        job.wait_until(lambda: path.read_text().count("\n") > steps)
        assert job.interrupt(limit=QUICK) == 75, job.output()


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_save_that_takes_long_is_not_cut(sign, text_folder):
    """No other rank says that the weights are there while one writes, and no timer ends it."""
    folder = text_folder / "run" / "weights"
    with training(
        text_folder, 2, "--steps", "2", "--sample-tokens", "1", program=(*FAULTY, "slow-disk")
    ) as job:
        job.wait_until((folder / "model.safetensors.partial").exists)
        assert job.interrupt(sign) == 75, job.output()
        text = job.output()
    assert "the weights are in run/weights" in text
    names = [path.name for path in sorted(folder.iterdir())]
    assert {"config.json", "model.safetensors"} < set(names)
    assert not [name for name in names if name.endswith(".partial")]


class Recorded(Interruptible):
    """A process that only notes why it would end."""

    speaks = False

    def __init__(self):
        self.ends = []

    def fail(self, error):
        self.ends.append(str(error))


@pytest.mark.parametrize("will_loop", [True, False])
def test_sigusr1_waits_for_steps_that_are_still_to_come(will_loop):
    """A SLURM job whose time ends while it starts up is resumed later, from a checkpoint."""
    process = Recorded()
    process.will_loop = will_loop
    process.interrupt(signal.SIGUSR1)
    assert process.stop_requested or not will_loop
    assert process.ends == ["interrupted (SIGUSR1)"] * (not will_loop)
    process.interrupt(signal.SIGTERM)
    assert process.ends.pop() == "interrupted (SIGTERM)"
    process.ends.clear()
    with process.stop_on_request():
        process.interrupt(signal.SIGUSR1)
        assert process.stop_requested
        assert process.ends == []
    process.interrupt(signal.SIGUSR1)
    assert process.ends == ["interrupted (SIGUSR1)"]


def test_nohup_is_honoured():
    assert signal.SIGHUP in obeyed()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert obeyed() == {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


AT_THE_END = """
import os, signal, time
from mpipar.run.checkpoint.manifest import committed_steps
from mpipar.run.process import session as launch
def main(argv, session):
    session.start()
    plain = launch.mpi.finalize
    launch.mpi.finalize = lambda MPI: (
        plain(MPI), os.kill(os.getpid(), signal.SIGINT), time.sleep(2))
    return 0
launch.guard(main, [])
"""


PAUSED = """
import os, signal, subprocess, time
from mpipar.run.process import signals
from mpipar.run.process.session import guard

def main(argv, session):
    with session.stop_on_request():
        pause = f"kill -STOP {os.getpid()}; sleep 0.06; kill -CONT {os.getpid()}; sleep 0.03"
        subprocess.run(["sh", "-c", "; ".join([pause] * 5)])
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        return 0 if session.stop_requested else 1

signals.LOOK_SECONDS = 0.02
guard(main)
"""


@pytest.mark.fault
def test_a_process_that_was_paused_obeys_signals_as_before():
    """A look at the signals outlasts its time then."""
    run_command([sys.executable, "-c", PAUSED], LIMIT, environment()).ended()


def test_when_mpi_has_ended_nothing_is_asked_of_it():
    result = run_command([sys.executable, "-c", AT_THE_END], LIMIT, environment()).ended(130)
    assert result.stderr.count(BLOCK) == 1, result.tail()


# --- alone


def doctor(**variables):
    """`mpipar doctor` as a single process with these variables of a launcher."""
    return mpipar("doctor", env=variables)


@pytest.mark.fault
def test_one_of_many_that_finds_itself_alone_stops():
    result = doctor(SLURM_STEP_NUM_TASKS="4", SLURM_NTASKS="4", SLURM_PROCID="0", SLURM_LOCALID="0")
    block_of(result, 69, "alone", "srun started 4", "--mpi=pmi2", "--mpi=pmix")
    assert "RuntimeWarning" not in result.stderr


@pytest.mark.slow
def test_only_one_of_them_tells():
    variables = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    result = doctor(**variables, SLURM_STEP_TASKS_PER_NODE="2").ended(69)
    assert result.stderr == ""


def test_one_process_in_a_batch_script_is_fine():
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NPROCS": "4"}
    doctor(**batch).ended()


@pytest.mark.fault
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


SMALL = (
    "train --layers 2 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --sample-tokens 0"
    " --num-microbatches 2 --steps 2 --layout tp=2 --data text.txt"
).split()


@pytest.mark.fault
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
