"""Self-test of the MPI library: the reductions that mpipar uses, and those of unsigned numbers.

Distributions ship libraries whose reductions are wrong: Open MPI up to 4.1.4 and MPICH up to 4.0.2
compare unsigned 64-bit numbers as signed ones. Each reduction runs on small whole numbers, so its
right result is known exactly on each rank. NumPy is not needed, because the ranks of a job test
their library before NumPy is loaded.
"""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING, Any

from mpipar.comm.launcher import read_launcher
from mpipar.errors import EnvironmentProblem

if TYPE_CHECKING:
    from mpi4py import MPI

TYPES = {"f": "float32", "d": "float64", "l": "int64"}  # by the codes of `array`
SIGNS = (1, -2, 3, -1, 2, -3, 1)
REPEATS, MANY_REPEATS = 11, 2000  # 77 numbers, and 56 kB of float32: other algorithms
TOP = 7  # ranks beyond this repeat the numbers of the first ones, so that float32 stays exact
HIGH = 1 << 63  # negative for a library that takes it for signed
LONG_MESSAGE = (1 << 31) + 8  # bytes
ENOUGH = 6 << 30  # bytes: a message on each of two ranks, and the library's copies
UNUSED = "MPI_MAX of uint64"  # mpipar takes the maximum of signed and floating numbers only


def wrong_reductions(mpi_comm: MPI.Intracomm) -> list[str]:
    """Return the reductions that gave this rank a wrong result, such as `MPI_SUM of int64`.

    Where ranks share a core, they take turns in non-blocking forms: some libraries never yield in a
    blocking call, and keep the core from the rank that they wait for.
    Comm: 16 small reductions, and one that tells whether ranks share cores.
    """
    from mpi4py import MPI

    own, size = mpi_comm.rank, mpi_comm.size
    crowded = array("l", [read_launcher(os.environ).local_size > len(os.sched_getaffinity(0))])
    mpi_comm.Iallreduce(MPI.IN_PLACE, crowded, MPI.MAX).Wait()
    places = [place % TOP + 1 for place in range(size)]
    results: list[tuple[str, array[Any], array[Any]]] = []  # what was tested, result, right result

    def numbers(
        code: str, factor: int, negative: int | None = None, repeats: int = REPEATS
    ) -> array[Any]:
        """Return SIGNS times a factor, or times another one where they are negative."""
        unit, below = 1 << 40 if code == "l" else 1, factor if negative is None else negative
        return array(code, [unit * s * (factor if s > 0 else below) for s in SIGNS]) * repeats

    def call(name: str, *arguments: Any) -> None:
        request = getattr(mpi_comm, f"I{name.lower()}" if crowded[0] else name)(*arguments)
        while request is not None and not request.Test():
            os.sched_yield()

    def all_reduce(words: str, op: MPI.Op, x: array[Any], want: array[Any]) -> None:
        call("Allreduce", MPI.IN_PLACE, x, op)
        results.append((words, x, want))

    for code, name in TYPES.items():
        mine, most, least = numbers(code, places[own]), max(places), min(places)
        all_reduce(f"MPI_SUM of {name}", MPI.SUM, mine[:], numbers(code, sum(places)))
        all_reduce(f"MPI_MAX of {name}", MPI.MAX, mine[:], numbers(code, most, least))
        all_reduce(f"MPI_MIN of {name}", MPI.MIN, mine[:], numbers(code, least, most))
    x = array("L", [i + HIGH * (i % size == own) for i in range(size)])
    all_reduce(UNUSED, MPI.MAX, x, array("L", [i + HIGH for i in range(size)]))
    for code in "fd":
        mine, whole = numbers(code, places[own]), numbers(code, sum(places))
        total, part = mine[:], mine[:]
        call("Reduce", mine, None if own else total, MPI.SUM)
        call("Reduce_scatter_block", mine * size, part)
        results += [
            (f"MPI_Reduce of {TYPES[code]}", total, mine if own else whole),
            (f"MPI_Reduce_scatter_block of {TYPES[code]}", part, whole),
        ]
    rows, many = mine * size, numbers("f", places[own], repeats=MANY_REPEATS)
    scattered = mpi_comm.Ireduce_scatter_block(MPI.IN_PLACE, rows)
    mpi_comm.Iallreduce(MPI.IN_PLACE, many).Wait()
    scattered.Wait()
    results += [
        ("MPI_Ireduce_scatter_block of float64", rows[: len(whole)], whole),
        ("MPI_Iallreduce of float32", many, numbers("f", sum(places), repeats=MANY_REPEATS)),
    ]
    return [words for words, got, want in results if got.tobytes() != want.tobytes()]


def check_reductions(mpi_comm: MPI.Intracomm, library: str) -> None:
    """Raise EnvironmentProblem if a reduction that mpipar uses is wrong here.

    Comm: that of `wrong_reductions`; none for a single rank.
    """
    if mpi_comm.size == 1:
        return
    if wrong := [words for words in wrong_reductions(mpi_comm) if words != UNUSED]:
        raise EnvironmentProblem(
            f"the MPI library ({library}) computes wrong results: {', '.join(wrong)}; use another"
            " one, for example that of pip install '.[mpich]'"
        )


def long_message(mpi_comm: MPI.Intracomm, free: int) -> str:
    """Return what becomes of a message of more than 2^31 bytes from rank 0 to rank 1, in words.

    free: bytes of memory that this host has available. The words are empty on ranks that see no
    fault. Comm: an all_reduce, and the message.
    """
    from mpi4py import MPI

    if mpi_comm.size == 1:
        return "a long message was not tried: it needs two ranks"
    room = array("l", [free])
    mpi_comm.Allreduce(MPI.IN_PLACE, room, MPI.MIN)
    if room[0] < ENOUGH:
        return f"a long message was not tried: it needs {ENOUGH >> 30} GiB of free memory on a host"
    x = bytearray(LONG_MESSAGE if mpi_comm.rank < 2 else 0)
    try:
        if mpi_comm.rank == 0:
            x[-1] = 1
            mpi_comm.Send(x, 1)
        elif mpi_comm.rank == 1:
            mpi_comm.Recv(x, 0)
            return "" if x[-1] else f"a message of {LONG_MESSAGE:,} bytes arrives damaged"
    except MPI.Exception as error:
        text = error.Get_error_string().split(":")[0]
        return f"a message of {LONG_MESSAGE:,} bytes is refused ({text})"
    return ""
