"""Shared-memory windows: the ranks of a host add up each other's numbers in place.

Each of p ranks adds up one p-th of all arrays. Arrays in a window (`zeros`) are not copied at all:
between two meetings a rank adds up its piece of all arrays, and writes the sum into all of them.
Other arrays pass through rooms of the window, one tile at a time, so that the rooms stay in the
caches.

Each piece is summed by a single rank, which begins with its own numbers and continues around the
group. Every rank thus has the same bits, and so has every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mpipar.comm.algorithms.mpi_library import MpiTransport, New
from mpipar.comm.algorithms.shared import Marks, SharedMemory, address
from mpipar.comm.algorithms.steps import Posted, Steps, add, in_line
from mpipar.comm.grid import chunk_slice
from mpipar.comm.request import Options, Request
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Shape

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike

TILE = 1 << 20  # bytes of an array in a room
SMALL = 1 << 15  # bytes up to which more than two ranks sum an array whole, in one meeting
ROOMS = 2  # one is written while the other is read
POSTED = 256  # operations that may be pending at once
PASSES = 1 << 20  # more meetings than any operation has
Meet: TypeAlias = Callable[[int], Request]  # what makes the n-th meeting of an operation


class WindowTransport(MpiTransport):
    """Sums of the ranks of one host through a shared window.

    Blocking sums use it for any array. Posted operations use it where the array is in the window;
    otherwise they are MPI's own, which make no rank wait. So is everything else.
    Comm: two windows over the group; one more for each array that `zeros` makes.
    """

    def __init__(self, ops: Ops, mpi_comm: MPI.Comm, options: Options, new: New | None = None):
        super().__init__(ops, mpi_comm, options, new)
        self.size, self.index = mpi_comm.size, mpi_comm.rank
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
        return memory.views(0, shape, dtype)[self.index]

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

    def meet(self) -> Request:
        """Return the next meeting of a blocking operation. All of them share one row of marks."""
        self.passed += 1
        return self.marks.meet(POSTED, self.passed)

    def post(self, steps: Callable[[list[Array], Meet], Steps], x: Array) -> Request | None:
        """Begin an operation on x, if it is in the window; else return None.

        steps: the operation, given the arrays of all ranks and the function that makes a meeting.
        """
        arrays = self.find(x)
        if arrays is None:
            return None
        self.number += 1
        row, turn = self.number % POSTED, self.number // POSTED * PASSES
        before = self.under_way.pop(row, None)
        if before is not None:
            before.Wait()
        posted = self.under_way[row] = Posted(
            steps(arrays, lambda meeting: self.marks.meet(row, turn + meeting))
        )
        return posted

    def add_up(self, sum_: Array, parts: list[Array]) -> None:
        """Add the others' numbers to sum_, this rank's own, beginning with the next rank."""
        for ahead in range(1, self.size):
            add(sum_, parts[(self.index + ahead) % self.size], sum_)

    def summed(self, arrays: list[Array], meet: Meet) -> Steps:
        """Sum arrays that are in the window. meet(n): the n-th meeting of this operation."""
        own = chunk_slice(len(arrays[0]), self.size, self.index)
        parts = [one[own] for one in arrays]
        yield meet(1)
        self.add_up(parts[self.index], parts)
        for ahead in range(1, self.size):
            parts[(self.index + ahead) % self.size][:] = parts[self.index]
        yield meet(2)

    def scattered(self, arrays: list[Array], meet: Meet) -> Steps:
        """Sum this rank's part of arrays (size, ...); the sum ends up in the first part."""
        parts = [one.reshape(self.size, -1)[self.index] for one in arrays]
        yield meet(1)
        self.add_up(parts[self.index], parts)
        yield meet(2)
        if self.index > 0:
            arrays[self.index].reshape(self.size, -1)[0] = parts[self.index]

    def gathered(self, arrays: list[Array], meet: Meet) -> Steps:
        """Write this rank's part of arrays (size, ...) into the arrays of all ranks."""
        parts = [one.reshape(self.size, -1)[self.index] for one in arrays]
        yield meet(1)
        for ahead in range(1, self.size):
            parts[(self.index + ahead) % self.size][:] = parts[self.index]
        yield meet(2)

    def iall_reduce(self, x: Array) -> Request:
        return self.post(self.summed, x) or super().iall_reduce(x)

    def ireduce_scatter(self, x: Array) -> Request:
        return self.post(self.scattered, x) or super().ireduce_scatter(x)

    def iall_gather(self, x: Array) -> Request:
        return self.post(self.gathered, x) or super().iall_gather(x)

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
            sum_tile = self.sum_pieces if self.size > 2 and x.nbytes > SMALL else self.sum_whole
            x, width = in_line(x), TILE // x.itemsize
            for first in range(0, len(x), width):
                sum_tile(x[first : first + width])

    def sum_whole(self, tile: Array) -> None:
        """Show a tile to all ranks, and add up all of theirs in the order of the group.

        With a piece per rank, two ranks would move as many bytes, and meet more often.
        """
        rooms = self.room(len(tile), tile.dtype)
        rooms[self.index][:] = tile
        self.meet().Wait()
        add(rooms[0], rooms[1], tile)
        for room in rooms[2:]:
            add(tile, room, tile)

    def sum_pieces(self, tile: Array) -> None:
        """Sum a tile, a piece on each rank, as an array in the window is summed."""
        rooms = self.room(len(tile), tile.dtype)
        rooms[self.index][:] = tile
        for meeting in self.summed(rooms, lambda _: self.meet()):
            meeting.Wait()
        tile[:] = rooms[self.index]

    def close(self) -> None:
        for memory in (*self.arrays, self.rooms, self.marks.memory):
            memory.free()
        super().close()
