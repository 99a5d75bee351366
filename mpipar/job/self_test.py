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

# By the codes of `array`: the type, and how often the numbers are repeated; 56 kB of float32 take
# another algorithm than a few numbers.
TYPES = {"f": ("float32", 2000), "d": ("float64", 11), "l": ("int64", 11)}
SIGNS = (1, -2, 3, -1, 2, -3, 1)
TOP = 7  # ranks beyond this repeat the numbers of the first ones, so that float32 stays exact
HIGH = 1 << 63  # negative for a library that takes it for signed
LONG_MESSAGE = (1 << 31) + 8  # bytes
ENOUGH = 6 << 30  # bytes: a message on each of two ranks, and the library's copies
UNUSED = "MPI_MAX of uint64"  # mpipar takes the maximum of signed and floating numbers only


def wrong_reductions(mpi_comm: MPI.Intracomm) -> list[str]:
    """Return the reductions that gave this rank a wrong result, such as `MPI_SUM of int64`.

    All are non-blocking and under way together: some libraries never yield in a blocking call, and
    keep the core from the rank that they wait for.
    Comm: 7 small reductions.
    """
    from mpi4py import MPI

    own, size = mpi_comm.rank, mpi_comm.size
    factors = [place % TOP + 1 for place in range(size)]
    results: list[tuple[str, array[Any], array[Any], MPI.Request]] = []

    def start(words: str, op: MPI.Op, x: array[Any], want: array[Any]) -> None:
        results.append((words, x, want, mpi_comm.Iallreduce(MPI.IN_PLACE, x, op)))

    for code, (name, repeats) in TYPES.items():
        unit = 1 << 40 if code == "l" else 1
        for words, op, combined in (("MPI_SUM", MPI.SUM, sum), ("MPI_MAX", MPI.MAX, max)):
            x = array(code, [unit * sign * factors[own] for sign in SIGNS]) * repeats
            want = [combined(unit * sign * factor for factor in factors) for sign in SIGNS]
            start(f"{words} of {name}", op, x, array(code, want) * repeats)
    x = array("L", [place + HIGH * (place % size == own) for place in range(size)])
    start(UNUSED, MPI.MAX, x, array("L", [place + HIGH for place in range(size)]))
    for *_, request in results:
        wait(request)
    return [words for words, got, want, _ in results if got.tobytes() != want.tobytes()]


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
