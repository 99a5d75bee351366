"""A process that ends before the job is never exit code 0, and no other user's files are trusted.

Ranks that die inside a run are in test_faults.py, other ends of a job in test_launch.py.
"""

import os
import stat
import sys
from pathlib import Path

import pytest
from fault_table import fault
from helpers import run_command, run_ranks
from program import LIMIT, block_of, environment

from mpipar.job import environment as job_environment
from mpipar.job.environment import own_folder, scratch

JOB = [sys.executable, Path(__file__).parent / "launch_job.py"]


STARTED = "from mpi4py import MPI; from mpipar.job.session import guard; guard(lambda *_: 0)"


def test_an_mpi_that_has_started_before_the_fork_is_refused():
    """MPI_Finalize would wait for threads that only the parent has."""
    block_of(
        run_command([sys.executable, "-c", STARTED], LIMIT, environment()),
        70,
        "Import mpi4py.MPI inside main",
    )


def test_a_process_without_a_launcher_is_watched_too():
    block = block_of(run_command([*JOB, "leave"], LIMIT, environment()), 70)
    assert "rank" not in block.splitlines()[2]


KILLED = """
import os, sys
from mpipar.job.session import guard
guard(lambda argv, session: os.kill(os.getpid(), int(argv[0])))
"""


@pytest.mark.parametrize(
    ("sign", "code", "said"),
    [
        (9, 69, "signal 9 (Killed), for example because memory"),
        (7, 69, "signal 7 (Bus error), for example because /dev/shm or a disk is full"),
        (11, 70, "signal 11 (Segmentation fault)"),
    ],
)
def test_a_signal_that_kills_is_named(sign, code, said):
    result = run_command([sys.executable, "-c", KILLED, str(sign)], LIMIT, environment())
    block_of(result, code, said)


PAUSED = """
import os, signal, time
from mpipar.job import supervisor
from mpipar.job.session import guard

def main(argv, session):
    for _ in range(5):
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(0.06)
        os.kill(os.getppid(), signal.SIGCONT)
        time.sleep(0.03)
    os.kill(os.getppid(), signal.SIGUSR1)
    time.sleep(0.1)
    return 0 if session.stop_requested else 1

def started(argv, session):
    with session.stop_on_request():
        return main(argv, session)

supervisor.LOOK_SECONDS = 0.02
guard(started)
"""


@fault(61, "a rank is paused and continues: Ctrl-Z and fg, or SLURM's suspend", 0)
def test_a_parent_that_was_paused_waits_and_passes_on_signals_as_before():
    """As after Ctrl-Z and fg, or when SLURM suspends a job: a look outlasts its time."""
    run_command([sys.executable, "-c", PAUSED], LIMIT, environment()).ended()


# --- folders that other users could have made


def test_a_folder_is_made_for_this_user_alone(tmp_path):
    own_folder(tmp_path / "own")
    own_folder(tmp_path / "own")
    assert stat.S_IMODE(os.stat(tmp_path / "own").st_mode) == 0o700


@pytest.mark.parametrize("how", ["link", "dangling", "file", "writable", "another user's"])
def test_what_another_user_may_have_put_there_is_not_used(how, tmp_path):
    path, target = tmp_path / "mpipar-1-2", tmp_path / "target"
    if how == "link":
        target.mkdir()
    if how in ("link", "dangling"):
        path.symlink_to(target)
    elif how == "file":
        path.write_text("planted")
    else:
        path.mkdir()
        path.chmod(0o777 if how == "writable" else 0o700)
    if how == "another user's":
        if os.getuid():
            pytest.skip("only root can give a folder away")
        os.chown(path, 65534, 65534)
    with pytest.raises(FileExistsError):
        own_folder(path)


def test_temporary_files_lie_in_the_user_s_own_folder_if_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(job_environment.tempfile, "gettempdir", lambda: "/somewhere")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert scratch("name").parent == tmp_path
    tmp_path.chmod(0o777)
    assert scratch("name").parent == Path("/somewhere")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert scratch("name").parent == Path("/somewhere")


def test_planted_records_choose_neither_exit_code_nor_silence(tmp_path):
    """Files of the names that earlier jobs have used for a decision."""
    target = tmp_path / "target"
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "first.json").write_text('{"exit_code": 0}')
    (tmp_path / "errors" / "rank-1.json").symlink_to(target)
    block_of(run_ranks(2, [*JOB, "exception", tmp_path], LIMIT, environment()), 70)
    assert not target.exists()
