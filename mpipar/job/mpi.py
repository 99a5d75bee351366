"""MPI for the session: the first and the last call, facts of all ranks, and what MPI leaves behind.

mpi4py's own functions for both keep Python's lock, so that no other thread runs until they return.
MPI_Init waits for all ranks, and so may MPI_Finalize. The watchdog has to run meanwhile. So this
file calls the library's functions through ctypes, which gives the lock away.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path

from mpipar.errors import EnvironmentProblem
from mpipar.job.environment import MPICH, Launcher, started

MAPS = Path("/proc/self/maps")


def load():
    """mpi4py.MPI, not yet initialized. Raises EnvironmentProblem if it cannot be loaded."""
    try:
        import mpi4py
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise EnvironmentProblem(f"MPI cannot be loaded ({reason}); install one with "
                                 "pip install '.[mpich]', or load your cluster's MPI") from error
    return MPI


def library_name() -> str:
    """Name and version of the MPI library, once it is loaded."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().split("\n", maxsplit=1)[0].strip("\0 ").split())


def initialize(MPI) -> None:
    """MPI_Init_thread, while other threads run. Errors of MPI are exceptions from then on.

    Comm: with all ranks of the job. Raises EnvironmentProblem.
    """
    if MPI.Is_initialized():
        return
    level = ctypes.c_int()
    code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(
        None, None, MPI.THREAD_MULTIPLE, ctypes.byref(level))
    if code:
        raise EnvironmentProblem(f"MPI cannot be started (MPI_Init_thread returned {code})")
    for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)


def finalize(MPI) -> None:
    """MPI_Finalize, while other threads run. Comm: with all ranks of the job."""
    ctypes.CDLL(MPI.__file__).MPI_Finalize()


def host_processes(communicator, rank: int, number: int) -> dict[int, list[int]]:
    """{world rank: process id, its start, number} of the ranks on this host.

    rank: this world rank. number: any of this rank's, for the others. For the start see `started`.
    Comm: a split, and an all-gather over the ranks of the host.
    """
    from mpi4py import MPI

    own = [rank, os.getpid(), started(os.getpid()), number]
    host = communicator.Split_type(MPI.COMM_TYPE_SHARED)
    numbers = array.array("q", [0] * len(own) * host.Get_size())
    host.Allgather(array.array("q", own), numbers)
    host.Free()
    return {rank: facts for rank, *facts in zip(*[iter(numbers)] * len(own), strict=True)}


def gather_bytes(communicator, own: bytes) -> list[bytes]:
    """Everybody's bytes, by rank. Comm: an all-gather of a length, and one of the bytes."""
    lengths = array.array("i", [0] * communicator.Get_size())
    communicator.Allgather(array.array("i", [len(own)]), lengths)
    received = bytearray(sum(lengths))
    communicator.Allgatherv(own, [received, lengths])
    ends = itertools.accumulate(lengths)
    return [bytes(received[end - length:end]) for end, length in zip(ends, lengths, strict=True)]


def gather_facts(communicator, fact) -> list:
    """Everybody's JSON-able fact, by rank, on every rank. Comm: two small all-gathers."""
    return [json.loads(one) for one in gather_bytes(communicator, json.dumps(fact).encode())]


def forget_shared_memory() -> None:
    """Remove the names of MPICH's shared memory, which stays until its last process ends.

    MPICH removes them in MPI_Finalize, so a job that is killed would leave them in /dev/shm. Call
    it when every rank of this host has left MPI_Init. Open MPI's launcher removes its own.
    """
    with contextlib.suppress(OSError):
        mapped = {line.split(maxsplit=5)[5] for line in MAPS.read_text().splitlines()
                  if "/mpich_shm_" in line}
        for path in mapped:
            Path(path).unlink(missing_ok=True)


def abort_before_start(launcher: Launcher, environ: Mapping[str, str], code: int) -> None:
    """End all ranks of the job from one that has not started MPI.

    MPICH's launcher lets the others wait in MPI_Init for a rank that has ended. So this speaks to
    it in its own words (PMI-1). Other launchers end the job when a process ends with an error;
    srun does so with --kill-on-bad-exit.
    """
    if launcher.name == MPICH and environ.get("PMI_FD", "").isdecimal():
        with contextlib.suppress(OSError):
            os.write(int(environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
