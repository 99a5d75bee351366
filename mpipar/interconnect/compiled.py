"""The rows named C: the loops of loops.c, compiled with MPI's own compiler wrapper.

World rank 0 compiles them and sends the library to all ranks, which load it from memory, so no
shared folder is needed. The loops run in the processes of the Python rows, on the same
communicators and buffers, in turns with them, so that only Python makes a difference.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mpipar.errors import EnvironmentProblem

SOURCE = Path(__file__).with_name("loops.c")
FLAGS = ("-O2", "-fPIC", "-shared")
CURE = "leave c out of --via"
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


def compiled(source: Path = SOURCE) -> bytes:
    """Return the shared library of a C source. Raises EnvironmentProblem."""
    wrapper = program_of_mpi("mpicc")
    if wrapper is None or shutil.which("cc") is None:
        missing = "mpicc" if wrapper is None else "cc"
        raise EnvironmentProblem(f"rows in C need {missing}: install it, or {CURE}")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "loops.so"
        done = subprocess.run(
            [wrapper, *FLAGS, "-o", str(target), str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise EnvironmentProblem(f"{source.name} did not compile: {done.stderr.strip()}")
        return target.read_bytes()


class Loops:
    """The functions of the library, loaded from memory.

    Raises EnvironmentProblem if it is linked with another MPI than the one that runs here.
    """

    def __init__(self, code: bytes):
        file = os.memfd_create("loops")
        try:
            os.write(file, code)
            self.library = ctypes.CDLL(f"/proc/self/fd/{file}")
        except OSError as error:
            raise EnvironmentProblem(f"rows in C: {error}; {CURE}") from error
        finally:
            os.close(file)
        if not self.library.is_running():
            raise EnvironmentProblem(f"mpicc belongs to another MPI library than mpi4py; {CURE}")

    def run(
        self, function: str, at: Any, team: Any, samples: int, *, xs: Any, ys: Any, count: int
    ) -> tuple[Any, Any]:
        """Return (entered, left): the times of `samples` samples of a function of loops.c.

        team: who starts together; None: without a barrier. xs, ys: the buffers of all samples, to
        send and to receive into. count: bytes of a message, or numbers of a sum. Comm: the messages
        of the samples.
        """
        from mpi4py import MPI

        assert count <= MOST_BYTES, count
        entered, left = np.empty((2, samples), np.int64)
        sent, received = (np.array([x.ctypes.data for x in some], np.uint64) for some in (xs, ys))
        ack = np.zeros(1, np.float32)
        kind = MPI.DOUBLE if at.item == 8 else MPI.FLOAT
        loop = Loop(
            team and MPI._addressof(team),
            MPI._addressof(at.mpi),
            MPI._addressof(kind),
            MPI._addressof(MPI.SUM),
            samples,
            1 - at.group_rank,
            at.group_rank == 0,
            count,
            len(xs) // samples,
            len(ys) // samples,
            sent.ctypes.data,
            received.ctypes.data,
            ack.ctypes.data,
            entered.ctypes.data,
            left.ctypes.data,
        )
        getattr(self.library, function)(ctypes.byref(loop))
        return entered, left


def loops_of(session: Any) -> Loops:
    """Return the compiled loops, on every rank. Raises EnvironmentProblem on all ranks if on one.

    Comm: two broadcasts over the world, and what `Session.agree` sends; every rank must call it.
    """
    world = session.world
    code = session.agree(lambda: compiled() if world.rank == 0 else b"")
    length = np.array([len(code)], np.int64)
    world.Bcast(length)
    whole = np.frombuffer(code.ljust(int(length[0])), np.uint8).copy()
    world.Bcast(whole)
    loops: Loops = session.agree(lambda: Loops(whole.tobytes()))
    return loops
