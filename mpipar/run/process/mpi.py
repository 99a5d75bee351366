"""MPI for the session: start and end, the ranks of a host, and cleaning up after MPI.

mpi4py's own functions for both hold Python's lock, so no other thread runs until they return. But
MPI_Init waits for all ranks, MPI_Finalize may too, and the watchdog has to run meanwhile. This
module therefore calls the library through ctypes, which releases the lock.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path

from mpipar.cache import cache_folder
from mpipar.comm.launcher import MPICH, OPEN_MPI, Launcher, check_alone, check_library, short_name
from mpipar.comm.objects import all_gather_objects
from mpipar.errors import EnvironmentProblem
from mpipar.run.process import consistency
from mpipar.run.process.streams import warn

MAPS = Path("/proc/self/maps")
LIBRARY = "MPI4PY_LIBMPI"  # if set, mpi4py loads exactly this library
ABI = "MPI4PY_MPIABI"  # if set, mpi4py loads a library of this kind: mpich or openmpi
NAMES = {MPICH: "libmpi.so.12", OPEN_MPI: "libmpi.so.40"}
DEBIAN_MPICH = "libmpich.so.12"  # also Ubuntu's


class OneRank:
    """The world of a process that runs alone, as without an MPI library; it sends nothing."""

    rank, size = 0, 1

    def Barrier(self) -> None:
        """Return at once, for programs of bench/."""


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
        warn(f"{problem}; continuing as rank 0 of 1")
        return OneRank()
    check_library(launcher, MPI.Get_library_version())
    initialize(MPI)
    check_alone(launcher, MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    return MPI.COMM_WORLD


def load():
    """Return mpi4py.MPI, not yet initialized. Raises EnvironmentProblem if it cannot be loaded."""
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        named = [f"{name}={os.environ[name]}" for name in (LIBRARY, ABI) if os.environ.get(name)]
        raise EnvironmentProblem(
            f"MPI cannot be loaded ({', '.join([str(error).splitlines()[0], *named])}): start ranks"
            " with the mpiexec of an installed library, install one with pip install '.[mpich]',"
            f" unset {LIBRARY}, or load your cluster's MPI"
        ) from error
    return MPI


def choose_library(
    launcher: Launcher, environ: MutableMapping[str, str], presets: Collection[str] = ()
) -> None:
    """Make mpi4py load the library of this launcher if the Python environment has none of its own.

    A system may have several. Call it first, because this process may start over: Debian's MPICH
    is called libmpich.so.12, mpi4py asks for libmpi.so.12, and the loader reads LD_LIBRARY_PATH
    only when a process starts. A link there has the right name. presets: what this process has set
    itself, and will set again.
    """
    name, own = NAMES.get(launcher.name), Path(sys.prefix, "lib")
    has_own = any((own / one).exists() for one in NAMES.values())
    if name is None or environ.get(LIBRARY) or environ.get(ABI) or has_own:
        return
    if _loads(name):
        environ[LIBRARY] = name
    elif launcher.name == MPICH:
        _start_with_link(environ, presets)


def _loads(name: str) -> bool:
    """Load a library into this process; return whether there is one."""
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL(name))
    return False


def _start_with_link(environ: Mapping[str, str], presets: Collection[str]) -> None:
    """Start this process over if Debian's MPICH is here and its link is not yet on the path."""
    folder, path = cache_folder("mpich"), environ.get("LD_LIBRARY_PATH", "")
    if folder is None or str(folder) in path.split(":") or not _loads(DEBIAN_MPICH):
        return
    library = next(one for one in _mapped() if Path(one).name.startswith(DEBIAN_MPICH))
    with contextlib.suppress(OSError):
        new = folder / str(os.getpid())
        new.symlink_to(library)
        new.replace(folder / NAMES[MPICH])
        own = {name: value for name, value in environ.items() if name not in presets}
        own["LD_LIBRARY_PATH"] = f"{folder}:{path}" if path else str(folder)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], own)  # noqa: S606 (itself)


def check_same(world, facts: Mapping[str, str]) -> None:
    """Raise EnvironmentProblem, with a table, on world rank 0 if ranks have other facts.

    Comm: a message to world rank 0, and no collective: the environment, which is compared first,
    may choose its algorithm.
    """
    text = json.dumps(facts, sort_keys=True).encode()
    if world.rank:
        world.Send(array.array("q", [len(text)]), 0)
        world.Send(text, 0)
        return
    everybody = [text]
    for rank in range(1, world.size):
        length = array.array("q", [0])
        world.Recv(length, rank)
        everybody.append(bytearray(length[0]))
        world.Recv(everybody[-1], rank)
    if any(one != text for one in everybody):
        table = consistency.differences(list(map(json.loads, everybody)))
        raise EnvironmentProblem(["the ranks of this job differ where they must not:", *table])


def library_name(world) -> str:
    """Return the name and version of the MPI library of a session's world."""
    if isinstance(world, OneRank):
        return "none"
    from mpi4py import MPI

    return short_name(MPI.Get_library_version())


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
    if not isinstance(world, OneRank):
        from mpi4py import MPI

        ctypes.CDLL(MPI.__file__).MPI_Finalize()


def host_ranks(communicator):
    """Return the world ranks of this host, and its number: hosts are numbered by lowest ranks.

    Comm: a split, two gathers of facts.
    """
    if communicator.size == 1:
        return (0,), 0
    from mpi4py import MPI

    host = communicator.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = all_gather_objects(host, communicator.rank)
    firsts = all_gather_objects(communicator, min(ranks))
    host.Free()
    return tuple(ranks), sorted({*firsts}).index(min(ranks))


def forget_shared_memory() -> None:
    """Unlink the names of MPICH's shared memory, which itself lives until its last process ends.

    MPICH unlinks them only in MPI_Finalize, so a job that is killed would leave them in /dev/shm.
    Call it once every rank of this host has left MPI_Init. Open MPI's launcher unlinks its own.
    """
    with contextlib.suppress(OSError):
        for path in _mapped():
            if "/mpich_shm_" in path:
                Path(path).unlink(missing_ok=True)


def _mapped() -> set[str]:
    """Return the paths of the files that this process has mapped."""
    lines = [line.split(maxsplit=5) for line in MAPS.read_text().splitlines()]
    return {line[5] for line in lines if len(line) > 5}


def abort(world, launcher: Launcher, environ: Mapping[str, str], code: int) -> None:
    """End all ranks of the job. world: None on a rank that has not started MPI.

    MPICH's launcher leaves the others waiting in MPI_Init for a rank that has ended, so such a rank
    tells the launcher in its own protocol (PMI-1). Other launchers end the job when a process exits
    with an error; srun does so with --kill-on-bad-exit.
    """
    if world is None:
        if launcher.name == MPICH and environ.get("PMI_FD", "").isdecimal():
            with contextlib.suppress(OSError):
                os.write(int(environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
    elif world.size > 1 or (launcher.name and not isinstance(world, OneRank)):
        world.Abort(code)
