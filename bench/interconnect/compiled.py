"""The rows named C: the loops of loops.c, compiled with MPI's own compiler wrapper.

World rank 0 compiles them and sends the library to all ranks, which load it from memory, so no
shared folder is needed. The loops run in the processes of the Python rows, on the same
communicators and buffers, in turns with them, so that only Python makes a difference.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from mpipar.errors import EnvironmentProblem

SOURCE = Path(__file__).with_name("loops.c")
WRAPPER = "mpicc"
FLAGS = ("-O2", "-fPIC", "-shared")
ACK_BYTES = 4  # of a short answer
MOST_BYTES = (1 << 31) - 1  # a count of the calls in loops.c is an int


class Loop(ctypes.Structure):
    """The C struct of the same name, in the same order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("team", "group", "type", "op")),
        *(
            (name, ctypes.c_int)
            for name in ("samples", "peer", "first", "count", "sends", "receives")
        ),
        *((name, ctypes.c_void_p) for name in ("xs", "ys", "ack", "entered", "left")),
    )


def program_of_mpi(name: str) -> str | None:
    """Return a program beside Python, where MPI's wheel puts it, or that of the system, or None."""
    return shutil.which(name, path=Path(sys.prefix) / "bin") or shutil.which(name)


def wrapper() -> str:
    """Return the compiler wrapper of the MPI library in use, which calls the system's `cc`.

    Raises EnvironmentProblem without one.
    """
    found = program_of_mpi(WRAPPER)
    if found is None or shutil.which("cc") is None:
        missing = WRAPPER if found is None else "cc"
        raise EnvironmentProblem(
            f"rows in C need a compiler, but there is no {missing}: install "
            "it, or leave C out of --ways"
        )
    return found


def compiled(source: Path = SOURCE) -> bytes:
    """Return the shared library of a C source. Raises EnvironmentProblem."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "loops.so"
        done = subprocess.run(
            [wrapper(), *FLAGS, "-o", str(target), str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise EnvironmentProblem(f"{source.name} did not compile: {done.stderr.strip()}")
        return target.read_bytes()


def loaded(code: bytes):
    """Return the functions of a shared library, loaded from memory.

    Raises EnvironmentProblem if it is linked with another MPI than the one that runs here.
    """
    file = os.memfd_create("loops")
    try:
        os.write(file, code)
        library = ctypes.CDLL(f"/proc/self/fd/{file}")
    except OSError as error:
        raise EnvironmentProblem(f"rows in C: {error}; leave C out of --ways") from error
    finally:
        os.close(file)
    if not library.is_running():
        raise EnvironmentProblem(
            f"rows in C: {WRAPPER} belongs to another MPI library than "
            "mpi4py; leave C out of --ways"
        )
    return library


def loops_of(session):
    """Return the compiled loops, on every rank. Raises EnvironmentProblem on all ranks if on one.

    Comm: two broadcasts over the world, and what `Session.agree` sends; every rank must call it.
    """
    world = session.world
    code = session.agree(lambda: compiled() if world.rank == 0 else b"")
    length = np.array([len(code)], np.int64)
    world.Bcast(length)
    whole = np.frombuffer(code.ljust(int(length[0])), np.uint8).copy()
    world.Bcast(whole)
    return session.agree(lambda: loaded(whole.tobytes()))


def addresses(arrays):
    """Return the addresses of some arrays, as a C function takes them."""
    return np.array([x.ctypes.data for x in arrays], np.uint64)


def run(
    library,
    function: str,
    group,
    team,
    samples: int,
    *,
    xs,
    ys=(),
    ack=None,
    count: int,
    peer: int = -1,
    first: bool = False,
    dtype="float32",
):
    """Return (entered, left): the times of `samples` samples of a function of loops.c.

    group, team: communicators; team is None where samples follow each other. xs, ys: the buffers of
    all samples, to send and to receive into. count: bytes of a message, or numbers of a sum. Comm:
    the messages of the samples.
    """
    from mpi4py import MPI

    entered, left = np.empty((2, samples), np.int64)
    sent, received = addresses(xs), addresses(ys)
    ack = np.zeros(1, np.float32) if ack is None else ack
    assert ack.nbytes >= ACK_BYTES, (ack.nbytes, "loops.c would write beyond it")
    assert count <= MOST_BYTES, count
    kind = MPI.DOUBLE if np.dtype(dtype).itemsize == 8 else MPI.FLOAT
    loop = Loop(
        team and MPI._addressof(team),
        MPI._addressof(group),
        MPI._addressof(kind),
        MPI._addressof(MPI.SUM),
        samples,
        peer,
        first,
        count,
        len(xs) // samples,
        len(ys) // samples,
        sent.ctypes.data,
        received.ctypes.data,
        ack.ctypes.data,
        entered.ctypes.data,
        left.ctypes.data,
    )
    getattr(library, function)(ctypes.byref(loop))
    return entered, left
