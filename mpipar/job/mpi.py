"""MPI for the session: start and end, the ranks of a host, and cleaning up after MPI.

mpi4py's own functions for both hold Python's lock, so no other thread runs until they return. But
MPI_Init waits for all ranks, MPI_Finalize may too, and the watchdog has to run meanwhile. This
module therefore calls the library through ctypes, which releases the lock.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from mpipar.comm.facts import all_gather_facts
from mpipar.comm.one_rank import OneRank
from mpipar.errors import EnvironmentProblem
from mpipar.job.environment import MPICH, Launcher, check_alone, check_library

MAPS = Path("/proc/self/maps")
LIBRARY = "MPI4PY_LIBMPI"  # if set, mpi4py loads exactly this library


def start(launcher: Launcher):
    """Start MPI and return COMM_WORLD; a single process without an MPI library gets a OneRank.

    Raises EnvironmentProblem if there are several ranks and no library, or if they are not one job.
    Comm: with all ranks of the job.
    """
    try:
        MPI = load()
    except EnvironmentProblem as problem:
        if launcher.size > 1:
            raise
        return OneRank(str(problem))
    check_library(launcher, MPI.Get_library_version())
    initialize(MPI)
    check_alone(launcher, MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    return MPI.COMM_WORLD


def load():
    """Return mpi4py.MPI, not yet initialized. Raises EnvironmentProblem if it cannot be loaded."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason, cure = str(error).splitlines()[0], "install one with pip install '.[mpich]'"
        if named := os.environ.get(LIBRARY):
            reason, cure = f"{reason}: {LIBRARY}={named}", f"unset {LIBRARY}"
        raise EnvironmentProblem(
            f"MPI cannot be loaded ({reason}); {cure}, or load your cluster's MPI"
        ) from error
    return MPI


def library_name(world) -> str:
    """Return the name and version of the MPI library of a session's world."""
    if isinstance(world, OneRank):
        return "none"
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().split("\n", maxsplit=1)[0].strip("\0 ").split())


def initialize(MPI) -> None:
    """Call MPI_Init_thread while other threads run; MPI's errors are exceptions from then on.

    Comm: with all ranks of the job. Raises EnvironmentProblem.
    """
    if MPI.Is_initialized():
        return
    level = ctypes.c_int()
    code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(
        None, None, MPI.THREAD_MULTIPLE, ctypes.byref(level)
    )
    if code:
        raise EnvironmentProblem(f"MPI cannot be started (MPI_Init_thread returned {code})")
    for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)


def finalize(world) -> None:
    """Call MPI_Finalize while other threads run. Comm: with all ranks of the job."""
    if isinstance(world, OneRank):
        return
    from mpi4py import MPI

    ctypes.CDLL(MPI.__file__).MPI_Finalize()


def host_ranks(communicator):
    """Return the world ranks of this host, the host's number, and words that its ranks share.

    The words are 64-bit integers in an MPI window, one per rank and initially zero; the window is
    the fourth value. Hosts are numbered by their lowest ranks. A OneRank shares no words.
    Comm: a split, two gathers of facts, a barrier.
    """
    if isinstance(communicator, OneRank):
        return (0,), 0, None, communicator
    from mpi4py import MPI

    host = communicator.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = all_gather_facts(host, communicator.Get_rank())
    firsts = all_gather_facts(communicator, min(ranks))
    own_bytes = 0 if host.Get_rank() else 8 * len(ranks)
    window = MPI.Win.Allocate_shared(own_bytes, 8, comm=host)
    words = memoryview(window.Shared_query(0)[0]).cast("B").cast("q")
    if own_bytes:
        words[:] = array.array("q", [0] * len(ranks))
    host.Barrier()
    host.Free()
    return tuple(ranks), sorted({*firsts}).index(min(ranks)), words, window


def forget_shared_memory() -> None:
    """Unlink the names of MPICH's shared memory, which itself lives until its last process ends.

    MPICH unlinks them only in MPI_Finalize, so a job that is killed would leave them in /dev/shm.
    Call it once every rank of this host has left MPI_Init. Open MPI's launcher unlinks its own.
    """
    with contextlib.suppress(OSError):
        mapped = {
            line.split(maxsplit=5)[5]
            for line in MAPS.read_text().splitlines()
            if "/mpich_shm_" in line
        }
        for path in mapped:
            Path(path).unlink(missing_ok=True)


def abort_before_start(launcher: Launcher, environ: Mapping[str, str], code: int) -> None:
    """End all ranks of the job from a rank that has not started MPI.

    MPICH's launcher leaves the others waiting in MPI_Init for a rank that has ended, so this tells
    the launcher in its own protocol (PMI-1). Other launchers end the job when a process exits with
    an error; srun does so with --kill-on-bad-exit.
    """
    if launcher.name == MPICH and environ.get("PMI_FD", "").isdecimal():
        with contextlib.suppress(OSError):
            os.write(int(environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
