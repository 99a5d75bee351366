"""A job for test_launch.py: `launch_job.py HOW [FOLDER]`; each HOW is a way to end or to go wrong.

If a rank is at fault, it is rank 1. FOLDER is the run folder, and receives a file for each rank
that is up.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from mpipar.errors import DataError, OutputError, UsageError
from mpipar.run.process import mpi
from mpipar.run.process.environment import started
from mpipar.run.process.session import guard


def fail_with(error):
    raise error


def no_return(world):
    """Wait for the rank at fault, as all other ranks do."""
    world.Barrier()
    time.sleep(600)


def wait_for_stop(session, world):
    """A loop of steps that all ranks leave at the same one."""
    with session.stop_on_request():
        ready(session, world)
        for step in range(600):
            time.sleep(0.05)
            asked = bytearray(world.Get_size())
            world.Allgather(bytes([session.stop_requested]), asked)
            if any(asked):
                print(f"left at step {step}", flush=True)
                time.sleep(0.5)  # in which a run saves, and the other ranks get their signals
                return 75
    return 70


def ready(session, world):
    (Path(session.run_folder) / f"up-{world.Get_rank()}").write_text(str(os.getpid()))


def fail_under_a_slow_launcher(session):
    """Rank 1 fails, and the launcher kills the other ranks when they have long seen its end.

    Meanwhile it also forwards nothing, so what the ranks say goes to a file.
    """
    from mpi4py import MPI

    class World(MPI.Intracomm):
        def Abort(self, code):
            launcher = session.launcher_pid
            subprocess.Popen(["sh", "-c", f"sleep 0.6; kill -CONT {launcher}"])
            os.kill(launcher, signal.SIGSTOP)
            super().Abort(code)

    session.world = World(session.world)
    said = Path(os.environ["TMPDIR"]) / "said"
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    session.world.Barrier()
    if session.world.Get_rank() == 1:
        raise OutputError("disk full")


def go_wrong(how, session, world):
    rank = world.Get_rank()
    if how == "leave" and rank == world.Get_size() // 2:
        ctypes.CDLL(None).exit(0)
    if how == "two":
        world.Barrier()
        if rank == 1:
            raise OutputError("disk full")
        if rank == 2:
            raise ValueError("a defect")
    elif how == "all":
        world.Barrier()
        raise ValueError("a defect")
    elif how == "slow-launcher":
        fail_under_a_slow_launcher(session)
    elif how == "unheard" and rank == 1:
        # nobody sees this error, because nobody reads the console any more
        for stream in (1, 2):
            os.dup2(os.open("/dev/full", os.O_WRONLY), stream)
        raise ValueError("a defect")
    elif rank == 1:
        if how in ("exception", "reporting-fails"):
            raise ValueError("a defect")
        if how == "user-error":
            raise OutputError("disk full")
        if how == "exit-0":
            sys.exit(0)
        if how == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how in ("thread", "single-threaded"):
            defect = ValueError("a defect")
            threading.Thread(target=fail_with, args=(defect,), name="helper", daemon=True).start()
            time.sleep(600)
    no_return(world)


def main(argv, session):
    session.launcher_pid = LAUNCHER
    how, folder = argv[0], argv[1] if len(argv) > 1 else None
    if how == "early-exception" and session.launcher.rank == 1:
        raise ValueError("a defect")
    if how == "early-usage":
        raise UsageError(["--x: unknown flag", "--y: wrong"])
    if how == "single-threaded":  # as in an MPI library that allows one thread only
        from mpi4py import rc

        rc.initialize = False
        from mpi4py import MPI

        MPI.Init_thread(MPI.THREAD_SINGLE)
    if how == "leave-in-start" and session.launcher.rank == 0:
        mpi.initialize = lambda _: ctypes.CDLL(None).exit(0)
    world = session.start()
    rank = world.Get_rank()
    if how == "alone":  # rank 0 works on when the other ranks have ended
        others = session.world.allgather(os.getpid())[1:]
        code = session.leave_mpi(0)
        while rank == 0 and any(map(started, others)):
            time.sleep(0.02)
        return code
    if folder:
        folder = Path(folder)
        session.agree(lambda: None if rank else session.lock(folder))
        session.use_folder(folder)
    session.where = (lambda: 1 / 0) if how == "reporting-fails" else lambda: "step 17"
    if how == "ranks-leave-with-different-codes":
        code = session.leave_mpi(1 if rank == 2 else 0)
        assert code == 1, code  # on every rank; a launcher would hide it
        return code
    if how == "agree-one":
        return session.agree(lambda: fail_with(DataError("missing")) if world.Get_rank() else 3)
    if how == "agree-all":
        return session.agree(lambda: fail_with(DataError(["missing", "empty"])))
    if how == "agree":
        assert session.agree(world.Get_rank) == world.Get_rank()
        assert session.host_ranks == tuple(range(world.Get_size()))
        return 0
    if how == "stop":
        return wait_for_stop(session, world)
    if how in ("stuck", "busy", "computing"):
        ready(session, world)
        if how == "computing":
            while True:
                sum(range(1000))
        if how == "stuck":  # rank 0 waits in MPI for ever; in a loop that allows a stop
            with session.stop_on_request():
                no_return(world)
        no_return(world)
    return go_wrong(how, session, world)


LAUNCHER = os.getppid()
guard(main)
