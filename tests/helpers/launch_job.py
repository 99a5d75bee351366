"""A job for test_launch.py: `launch_job.py HOW [FOLDER]`; each HOW is a way to end or to go wrong.

If a rank is at fault, it is rank 1. FOLDER is the run folder, and receives a file for each rank
that is up.
"""

import ctypes
import os
import signal
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


def defect():
    raise ValueError("a defect")


def no_return(world):
    """Wait for the rank at fault, as all other ranks do."""
    world.Barrier()
    time.sleep(600)


def ready(session, world):
    (Path(session.watch.folder) / f"up-{world.rank}").write_text(str(os.getpid()))


# --- before MPI


def single_threaded():
    """As in an MPI library that allows one thread only."""
    from mpi4py import rc

    rc.initialize = False
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_SINGLE)


EARLY = {
    "early-exception": lambda rank: rank == 1 and defect(),
    "early-usage": lambda rank: fail_with(UsageError(["--x: unknown flag", "--y: wrong"])),
    "single-threaded": lambda rank: single_threaded(),
    "leave-in-start": lambda rank: (
        rank == 0 and setattr(mpi, "initialize", lambda _: ctypes.CDLL(None).exit(0))
    ),
}


# --- rank 1 while the others wait for it


def in_a_thread():
    threading.Thread(target=defect, name="helper", daemon=True).start()
    time.sleep(600)


def unheard():
    """Nobody sees this error, because nobody reads the console any more."""
    for stream in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), stream)
    defect()


AT_FAULT = {
    "exception": defect,
    "reporting-fails": defect,
    "user-error": lambda: fail_with(OutputError("disk full")),
    "exit-0": lambda: sys.exit(0),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "thread": in_a_thread,
    "single-threaded": in_a_thread,
    "unheard": unheard,
}


# --- several ranks


def at_once(world, errors):
    """Let these ranks fail at the same moment."""
    world.Barrier()
    if world.rank in errors:
        raise errors[world.rank]
    no_return(world)


def leave(session, world):
    """Rank 1, or the only one, is ended by a library's exit()."""
    if world.rank == world.size // 2:
        ctypes.CDLL(None).exit(0)
    no_return(world)


def work_alone(session, world):
    """Rank 0 works on when the other ranks have ended."""
    others = world.allgather(os.getpid())[1:]
    code = session.leave_mpi(0)
    while session.launcher.rank == 0 and any(map(started, others)):
        time.sleep(0.02)
    return code


def agree(session, world):
    """All ranks agree, and leave with the code of one, which a launcher would hide."""
    assert session.agree(lambda: world.rank) == world.rank
    assert session.host_ranks == tuple(range(world.size))
    code = session.leave_mpi(1 if world.rank == 2 else 0)
    assert code == 1, code
    return code


def wait_for_ever(session, world):
    ready(session, world)
    no_return(world)


def wait_in_a_loop(session, world):
    """As in a loop of steps, which allows a stop."""
    with session.stop_on_request():
        wait_for_ever(session, world)


def compute(session, world):
    ready(session, world)
    while True:
        sum(range(1000))


ENDS = {
    "two": lambda _, world: at_once(world, {1: OutputError("full"), 2: ValueError("a defect")}),
    "all": lambda _, world: at_once(world, {world.rank: ValueError("a defect")}),
    "leave": leave,
    "alone": work_alone,
    "agree": agree,
    "agree-one": lambda session, world: session.agree(
        lambda: world.rank and fail_with(DataError("missing"))
    ),
    "agree-all": lambda session, _: session.agree(
        lambda: fail_with(DataError(["missing", "empty"]))
    ),
    "busy": wait_for_ever,
    "stuck": wait_in_a_loop,
    "computing": compute,
}


def main(argv, session):
    how, *folders = argv
    if how in EARLY:
        EARLY[how](session.launcher.rank)
    world = session.start()
    for folder in map(Path, folders):
        session.agree(lambda folder=folder: world.rank or session.lock(folder))
        session.use_folder(folder)
    session.where = (lambda: 1 / 0) if how == "reporting-fails" else lambda: "step 17"
    if how in ENDS:
        return ENDS[how](session, world)
    if how in AT_FAULT and world.rank == 1:
        AT_FAULT[how]()
    return no_return(world)


guard(main)
