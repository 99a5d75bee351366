"""Self-test of the MPI library: the reductions that mpipar uses, and those of unsigned numbers.

Distributions ship libraries whose reductions are wrong: Open MPI up to 4.1.4 and MPICH up to 4.0.2
compare unsigned 64-bit numbers as signed ones. Each reduction runs on small whole numbers, so its
right result is known exactly on each rank. NumPy is not needed, because the ranks of a job test
their library before NumPy is loaded.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from time import perf_counter
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

    Where a core has several ranks, all are in their non-blocking forms and under way together: some
    libraries never yield in a blocking call, and keep the core from the rank that they wait for.
    Comm: 14 small reductions, and one that tells whether ranks share cores.
    """
    from mpi4py import MPI

    own, size = mpi_comm.rank, mpi_comm.size
    places = [place % TOP + 1 for place in range(size)]
    crowded = array("l", [shares_cores()])
    wait(mpi_comm.Iallreduce(MPI.IN_PLACE, crowded, MPI.MAX))
    under_way: list[tuple[MPI.Request | None, Any]] = []
    results: list[tuple[str, array[Any], array[Any]]] = []

    def numbers(
        code: str, factor: int, negative: int | None = None, repeats: int = REPEATS
    ) -> array[Any]:
        """Return SIGNS times a factor, or times another one where they are negative."""
        unit, below = 1 << 40 if code == "l" else 1, factor if negative is None else negative
        return array(code, [unit * s * (factor if s > 0 else below) for s in SIGNS]) * repeats

    def call(name: str, *arguments: Any) -> None:
        if crowded[0] and not name.startswith("I"):
            name = f"I{name.lower()}"
        under_way.append((getattr(mpi_comm, name)(*arguments), arguments))

    def all_reduce(words: str, op: MPI.Op, x: array[Any], want: array[Any]) -> None:
        call("Allreduce", MPI.IN_PLACE, x, op)
        results.append((words, x, want))

    for code, name in TYPES.items():
        x, largest = numbers(code, places[own]), numbers(code, max(places), min(places))
        all_reduce(f"MPI_SUM of {name}", MPI.SUM, x[:], numbers(code, sum(places)))
        all_reduce(f"MPI_MAX of {name}", MPI.MAX, x[:], largest)
    all_reduce("MPI_MIN of int64", MPI.MIN, x, numbers("l", min(places), max(places)))
    x = array("L", [i + HIGH * (i % size == own) for i in range(size)])
    all_reduce(UNUSED, MPI.MAX, x, array("L", [i + HIGH for i in range(size)]))
    for code in "fd":
        mine, whole = numbers(code, places[own]), numbers(code, sum(places))
        total, part = mine[:], mine[:]
        call("Reduce", mine, None if own else total, MPI.SUM)
        call("Reduce_scatter_block", mine * size, part)
        if own == 0:
            results.append((f"MPI_Reduce of {TYPES[code]}", total, whole))
        results.append((f"MPI_Reduce_scatter_block of {TYPES[code]}", part, whole))
    rows, many = mine * size, numbers("f", places[own], repeats=MANY_REPEATS)
    call("Ireduce_scatter_block", MPI.IN_PLACE, rows)
    call("Iallreduce", MPI.IN_PLACE, many)
    for request, _buffers in under_way:  # mpi4py does not keep the buffers
        if request is not None:
            wait(request)
    results += [
        ("MPI_Ireduce_scatter_block of float64", rows[: len(whole)], whole),
        ("MPI_Iallreduce of float32", many, numbers("f", sum(places), repeats=MANY_REPEATS)),
    ]
    return [words for words, got, want in results if got.tobytes() != want.tobytes()]


def shares_cores() -> bool:
    """Return whether this host has more ranks than cores, according to the launcher."""
    return read_launcher(os.environ).local_size > len(os.sched_getaffinity(0))


def wait(request: MPI.Request) -> None:
    """Wait for a request; ranks that share cores give them to each other meanwhile."""
    crowded = shares_cores()
    while not request.Test():
        if crowded:
            os.sched_yield()


def timed_test(mpi_comm: MPI.Intracomm) -> tuple[list[str], float]:
    """Return what `wrong_reductions` finds, and the milliseconds it took.

    Comm: two barriers around that.
    """
    wait(mpi_comm.Ibarrier())
    start = perf_counter()
    found = wrong_reductions(mpi_comm)
    wait(mpi_comm.Ibarrier())
    return found, (perf_counter() - start) * 1e3


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


def long_messages(mpi_comm: MPI.Intracomm) -> list[str]:
    """Return what becomes of messages of more than 2^31 bytes from rank 0 to rank 1, in words.

    Both are sent once as float32, as mpipar sends its arrays, and once as more than 2^31 bytes. The
    words are empty on ranks that see no fault.
    Comm: an all_reduce, and up to two messages.
    """
    from mpi4py import MPI

    if mpi_comm.size == 1:
        return ["long messages were not tried: they need two ranks"]
    room = array("l", [available() if mpi_comm.rank < 2 else 2 * ENOUGH])
    mpi_comm.Allreduce(MPI.IN_PLACE, room, MPI.MIN)
    if room[0] < ENOUGH:
        return [f"long messages were not tried: they need {ENOUGH >> 30} GiB of free memory"]
    found: list[str] = []
    x = bytearray(LONG_MESSAGE) if mpi_comm.rank < 2 else bytearray()
    for number, (words, datatype) in enumerate((("float32", MPI.FLOAT), ("bytes", MPI.BYTE)), 1):
        count = LONG_MESSAGE // datatype.Get_size()
        try:
            if mpi_comm.rank == 0:
                x[-1] = number
                mpi_comm.Send([x, count, datatype], 1)
            elif mpi_comm.rank == 1:
                mpi_comm.Recv([x, count, datatype], 0)
                if x[-1] != number:
                    found.append(f"a message of {LONG_MESSAGE:,} bytes as {words} arrives damaged")
        except MPI.Exception as error:
            text = error.Get_error_string().split(":")[0]
            found.append(f"a message of {count:,} {words} is refused ({text})")
    return found


def available() -> int:
    """Return the bytes of memory that new processes of this host can use."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
