"""Shared-memory windows: the ranks of a host add up each other's numbers in place.

Arrays in a window (`zeros`) are not copied at all: between two meetings each of p ranks adds up one
p-th of all arrays, and writes the sum into all of them. Other arrays pass through rooms of the
window, one tile at a time, so that the rooms stay in the caches.

Each piece is summed by a single rank, which begins with its own numbers and continues around the
group; a tile in the rooms is summed by each rank in the order of the group. Every rank thus has the
same bits, and so has every run.

The memory is an MPI-3 window (`MPI_Win_allocate_shared`) in one passive epoch that lasts as long as
the window. Two rules apply inside it. A rank publishes what it wrote by a fence (`Win.Sync`)
followed by a mark. A rank that has seen another rank's mark also makes a fence before it reads what
that rank wrote. This is how the MPI standard, section "Window Synchronization", polls a flag. Only
its owner writes a mark, and marks only grow. A rank that waits for marks calls MPI now and then, so
that its messages progress meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.comm.algorithms.steps import Posted, Steps, add, in_line
from mpipar.comm.grid import chunk_slice
from mpipar.comm.mpi import MpiTransport, PollingRequest
from mpipar.comm.transport import New, Options, Request
from mpipar.errors import EnvironmentProblem
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Shape

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike


TILE = 1 << 20  # bytes of an array in a room
ROOMS = 2  # one is written while the other is read
POSTED = 256  # operations that may be pending at once
PASSES = 1 << 20  # more meetings than any operation has


class WindowTransport(MpiTransport):
    """Sums of the ranks of one host through a shared window.

    Blocking sums use it for any array. Posted sums use it where the array is in the window;
    otherwise they are MPI's own, which make no rank wait. So is everything else.
    Comm: two windows over the group; one more for each array that `zeros` makes.
    """

    def __init__(self, ops: Ops, mpi_comm: MPI.Comm, options: Options, new: New | None = None):
        super().__init__(ops, mpi_comm, options, new)
        self.size, self.group_rank = mpi_comm.size, mpi_comm.rank
        self.marks = Marks(mpi_comm, POSTED + 1, options.yields_cpu)
        self.rooms = SharedMemory(mpi_comm, ROOMS * TILE)
        self.turn = self.passed = self.number = 0  # rooms, meetings, and posted operations so far
        self.under_way: dict[int, Posted] = {}  # by the row of their marks
        self.arrays: list[SharedMemory] = []
        self.found: dict[tuple[int, int, np.dtype], list[Array]] = {}  # by address, size and type
        self.typed: dict[tuple[int, np.dtype], list[Array]] = {}  # the rooms of a turn

    def zeros(self, shape: Shape, dtype: DTypeLike, label: str) -> Array:
        """Return zeros in the window, so that their sums need no copies. Comm: a new window."""
        dtype = np.dtype(dtype)
        memory = SharedMemory(self.mpi, int(np.prod(shape)) * dtype.itemsize)
        self.arrays.append(memory)
        return memory.views(0, shape, dtype)[self.group_rank]

    def find(self, x: Array) -> list[Array] | None:
        """Return the arrays of all ranks at the place of x, if x is in the window."""
        begin = address(x)
        for memory in self.arrays:
            if 0 <= begin - memory.begin < memory.nbytes:
                key = begin, x.size, x.dtype
                if key not in self.found:
                    self.found[key] = memory.views(begin - memory.begin, (x.size,), x.dtype)
                return self.found[key]
        return None

    def summed(self, arrays: list[Array], row: int, turn: int) -> Steps:
        """Sum arrays that are in the window, and meet before and after it in a row of marks."""
        piece = chunk_slice(len(arrays[0]), self.size, self.group_rank)
        own, *others = (arrays[(self.group_rank + k) % self.size][piece] for k in range(self.size))
        yield self.marks.meet(row, turn + 1)
        for other in others:
            add(own, other, own)
        for other in others:
            other[:] = own
        yield self.marks.meet(row, turn + 2)

    def iall_reduce(self, x: Array) -> Request:
        """Begin a sum, in the window if x is there; else it is MPI's own."""
        arrays = self.find(x)
        if arrays is None:
            return super().iall_reduce(x)
        self.number += 1
        row, turn = self.number % POSTED, self.number // POSTED * PASSES
        before = self.under_way.pop(row, None)
        if before is not None:
            before.Wait()
        posted = self.under_way[row] = Posted(self.summed(arrays, row, turn))
        return posted

    def room(self, size: int, dtype: np.dtype) -> list[Array]:
        """Return the next room of each rank, written to while others read the one before it."""
        self.turn = (self.turn + 1) % ROOMS
        key = self.turn, dtype
        if key not in self.typed:
            self.typed[key] = self.rooms.views(self.turn * TILE, (TILE // dtype.itemsize,), dtype)
        return [room[:size] for room in self.typed[key]]

    def all_reduce(self, x: Array, op: str) -> None:
        if op != "sum":
            super().all_reduce(x, op)
        elif self.find(x) is not None:
            self.iall_reduce(x).Wait()
        else:
            x, width = in_line(x), TILE // x.itemsize
            for first in range(0, len(x), width):
                self.sum_tile(x[first : first + width])

    def sum_tile(self, tile: Array) -> None:
        """Show a tile to all ranks, and add up all of theirs in the order of the group."""
        rooms = self.room(len(tile), tile.dtype)
        rooms[self.group_rank][:] = tile
        self.passed += 1
        self.marks.meet(POSTED, self.passed).Wait()  # the row of all blocking operations
        add(rooms[0], rooms[1], tile)
        for room in rooms[2:]:
            add(tile, room, tile)

    def close(self) -> None:
        for memory in (*self.arrays, self.rooms, self.marks.memory):
            memory.free()
        super().close()


LINE = 64  # bytes of a cache line: marks of different operations do not share one
PAGE = 4096
MADV_POPULATE_WRITE = 23  # of Linux: reports a full file system, where a write is killed
POLLS = 50  # looks at the marks between two calls of MPI
SHARED_MEMORY = Path("/dev", "shm")  # where MPI libraries keep it on Linux


class SharedMemory:
    """The same number of bytes for each rank of a group on one host, all visible to all of them.

    of: the bytes of each rank. begin: address of this rank's bytes. Raises EnvironmentProblem on
    all ranks if the host has less room, because a rank that wrote there would be killed.
    Comm: an all_reduce of a number, the window's, and a barrier.
    """

    def __init__(self, mpi_comm: MPI.Comm, nbytes: int):
        from mpi4py import MPI

        self.nbytes = -(-nbytes // PAGE) * PAGE
        check_room(mpi_comm, room_left(), self.nbytes)
        self.window = MPI.Win.Allocate_shared(
            self.nbytes, 1, MPI.INFO_NULL, MPI.Intracomm(mpi_comm)
        )
        self.window.Lock_all(MPI.MODE_NOCHECK)
        memories: list[Any] = [self.window.Shared_query(one)[0] for one in range(mpi_comm.size)]
        self.of = [np.frombuffer(one, np.uint8, self.nbytes) for one in memories]
        own = self.of[mpi_comm.rank]
        # Other groups, which looked at the same time, may have taken the room meanwhile.
        check_room(mpi_comm, sys.maxsize if get_pages(own) else 0, self.nbytes)
        own[:] = 0  # where the kernel could not get its pages above, places them near this rank
        self.begin = address(own)
        self.window.Sync()
        mpi_comm.Barrier()
        self.window.Sync()

    def views(self, start: int, shape: Shape, dtype: DTypeLike) -> list[Array]:
        """Return one array per rank, at the same place in its bytes."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return [one[start : start + size].view(dtype).reshape(shape) for one in self.of]

    def free(self) -> None:
        """End the window; its arrays must not be used any more. Comm: every member."""
        self.window.Unlock_all()
        self.window.Free()


class Meeting:
    """A request that is done when all ranks have reached a mark.

    marks: of the other ranks. fence: makes visible what they wrote. ask: lets messages progress.
    """

    __slots__ = ("ask", "fence", "mark", "marks")

    def __init__(
        self,
        marks: Sequence[memoryview],
        mark: int,
        fence: Callable[[], None],
        ask: Callable[[], bool],
    ):
        self.marks, self.mark, self.fence, self.ask = marks, mark, fence, ask

    def _is_done(self) -> bool:
        for other in self.marks:
            if other[0] < self.mark:
                return False
        self.fence()
        return True

    def Test(self) -> bool:
        if self._is_done():
            return True
        self.ask()
        return False

    def Wait(self) -> None:
        while True:
            for _ in range(POLLS):
                if self._is_done():
                    return
            self.ask()
            os.sched_yield()  # the rank it waits for may have no core


class Marks:
    """A row of marks for each rank; `meet` is the only way to use them."""

    def __init__(self, mpi_comm: MPI.Comm, rows: int, yields_cpu: bool):
        self.memory = SharedMemory(mpi_comm, rows * LINE)
        own, self.yields_cpu = mpi_comm.rank, yields_cpu
        rows_of: list[Any] = [one[: rows * LINE].view(np.int64) for one in self.memory.of]
        views = [memoryview(one) for one in rows_of]
        step = LINE // 8
        self.own = [views[own][row * step : row * step + 1] for row in range(rows)]
        self.others = [
            [view[row * step : row * step + 1] for one, view in enumerate(views) if one != own]
            for row in range(rows)
        ]
        self.fence, self.ask = self.memory.window.Sync, mpi_comm.Iprobe

    def meet(self, row: int, mark: int) -> Request:
        """Publish what this rank wrote and set its mark; the request is done when all have."""
        self.fence()
        self.own[row][0] = mark
        meeting = Meeting(self.others[row], mark, self.fence, self.ask)
        return PollingRequest(meeting) if self.yields_cpu else meeting


def address(x: Array) -> int:
    """Return the address at which an array of host memory begins."""
    start: int = x.__array_interface__["data"][0]
    return start


def check_room(mpi_comm: MPI.Comm, left: int, nbytes: int) -> None:
    """Raise EnvironmentProblem on every rank if one has less left than all need, nbytes each.

    Comm: an all_reduce.
    """
    from mpi4py import MPI

    least, needed = np.array([left]), nbytes * mpi_comm.size
    mpi_comm.Allreduce(MPI.IN_PLACE, least, op=MPI.MIN)
    if least[0] < needed:
        raise EnvironmentProblem(
            f"{SHARED_MEMORY} has {least[0] >> 20} MiB left, and a window of {mpi_comm.size}"
            f" ranks needs {-(-needed >> 20)} MiB: use --all-reduce mpi, or provide more of it"
            " (docker run --shm-size)"
        )


def get_pages(x: Array) -> bool:
    """Get the pages of x; return False if there is no room. Linux before 5.14 does not say so."""
    libc = ctypes.CDLL(None, use_errno=True)
    start, size = ctypes.c_void_p(address(x)), ctypes.c_size_t(x.nbytes)
    return libc.madvise(start, size, MADV_POPULATE_WRITE) == 0 or ctypes.get_errno() not in (
        errno.EFAULT,
        errno.ENOMEM,
    )


def room_left() -> int:
    """Return the bytes left for shared memory on this host; sys.maxsize where that is unknown."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return sys.maxsize
    return found.f_bavail * found.f_frsize
