"""Self-test of the MPI library: the reductions that mpipar uses.

Distributions ship libraries whose reductions are wrong: Open MPI up to 4.1.4 and MPICH up to 4.0.2
compare unsigned 64-bit numbers, which mpipar never reduces, as signed ones. Each reduction runs on
small whole numbers, so its right result is known exactly on each rank. NumPy is not needed, because
the ranks of a job test their library before NumPy is loaded.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpipar.comm.launcher import read_launcher
from mpipar.errors import EnvironmentProblem

if TYPE_CHECKING:
    from mpi4py import MPI

TYPES = {  # by the codes of `array`: name, unit of the numbers
    "f": ("float32", 1),
    "d": ("float64", 1),
    "l": ("int64", 1 << 40),
}
SIGNS = (1, -2, 3, -1, 2, -3, 1)
REPEATS, MANY = 11, 200  # 77 numbers, and 62 kB of float32: other algorithms
TOP = 7  # ranks beyond this repeat the numbers of the first ones, so that float32 stays exact
LONG_MESSAGE = (1 << 31) + 8  # bytes
ENOUGH = 6 << 30  # bytes: a message on each of two ranks, and the library's copies


def wrong_reductions(mpi_comm: MPI.Intracomm) -> list[str]:
    """Return the reductions that gave this rank a wrong result, such as `MPI_SUM of int64`.

    Where ranks share a core, they take turns in non-blocking forms: some libraries never yield in a
    blocking call, and keep the core from the rank that they wait for.
    Comm: 21 small reductions, and one that tells whether ranks share cores.
    """
    from mpi4py import MPI

    own, size = mpi_comm.rank, mpi_comm.size
    crowded = array("l", [read_launcher(os.environ).local_size > len(os.sched_getaffinity(0))])
    mpi_comm.Iallreduce(MPI.IN_PLACE, crowded, MPI.MAX).Wait()
    places = [place % TOP + 1 for place in range(size)]
    least, most, total = min(places), max(places), sum(places)
    rights: dict[str, Callable[[int], int]] = {
        "SUM": lambda sign: sign * total,
        "MAX": lambda sign: max(sign * least, sign * most),
        "MIN": lambda sign: min(sign * least, sign * most),
    }
    results: list[tuple[str, array[Any], array[Any]]] = []  # what was tested, result, right result

    def numbers(code: str, of_sign: Callable[[int], int]) -> array[Any]:
        return array(code, [TYPES[code][1] * of_sign(sign) for sign in SIGNS]) * REPEATS

    def call(name: str, *arguments: Any) -> None:
        request = getattr(mpi_comm, f"I{name.lower()}" if crowded[0] else name)(*arguments)
        while request is not None and not request.Test():
            os.sched_yield()

    for code, (name, _) in TYPES.items():
        mine, whole = numbers(code, places[own].__mul__), numbers(code, rights["SUM"])
        for word, right in rights.items():
            x = mine[:]
            call("Allreduce", MPI.IN_PLACE, x, getattr(MPI, word))
            results.append((f"MPI_{word} of {name}", x, numbers(code, right)))
        reduced, part, rows, many = mine[:], mine[:], mine * size, mine * MANY
        call("Reduce", mine, None if own else reduced, MPI.SUM)
        call("Reduce_scatter_block", rows, part)
        mpi_comm.Ireduce_scatter_block(MPI.IN_PLACE, rows).Wait()
        mpi_comm.Iallreduce(MPI.IN_PLACE, many).Wait()
        results += [
            (f"MPI_Reduce of {name}", reduced, mine if own else whole),
            (f"MPI_Reduce_scatter_block of {name}", part, whole),
            (f"MPI_Ireduce_scatter_block of {name}", rows[: len(whole)], whole),
            (f"MPI_Iallreduce of {name}", many, whole * MANY),
        ]
    return [words for words, got, want in results if got.tobytes() != want.tobytes()]


def check_reductions(mpi_comm: MPI.Intracomm, library: str) -> None:
    """Raise EnvironmentProblem if a reduction that mpipar uses is wrong here.

    Comm: that of `wrong_reductions`; none for a single rank.
    """
    if mpi_comm.size == 1:
        return
    if wrong := wrong_reductions(mpi_comm):
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
    except MPI.Exception as error:
        text = error.Get_error_string().split(":")[0]
        return f"a message of {LONG_MESSAGE:,} bytes is refused ({text})"
    arrived = mpi_comm.rank > 1 or x[-1]
    return "" if arrived else f"a message of {LONG_MESSAGE:,} bytes arrives damaged"
