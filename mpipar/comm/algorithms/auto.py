"""`auto`: measures the algorithms briefly, and uses the fastest one for each array size.

Each group measures on its own, but all groups of an axis at the same time, as in a step. The
largest time of any of its ranks counts, so they all make the same choice. Arrays in the window are
measured separately, because they need no copies. The choice is passed to the caller and kept with
the run: see `Options.chosen`.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.comm.algorithms.own import MpiOwn
from mpipar.comm.algorithms.window import Window
from mpipar.comm.request import Array, Options, Request

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = tuple(1 << power for power in range(12, 23, 2))  # bytes: 4 KiB to 4 MiB
ROUNDS = 7  # of each algorithm and size, in turns
MARGIN = 0.9  # of MPI's time: a smaller gain does not justify another order of a sum
WAYS = ("own", "window")  # where an array is: anywhere, or in the window


class Auto(MpiOwn):
    """Hands each operation to the algorithm that was chosen for its size.

    kinds: {name: class}. Comm: that of all of them, and the measurement unless its result is known.
    """

    def __init__(self, ops: Any, mpi_comm: MPI.Intracomm, options: Options,
                 kinds: dict[str, type[MpiOwn]]):
        super().__init__(ops, mpi_comm, options)
        self.all = {name: kind(ops, mpi_comm, options) for name, kind in kinds.items()}
        window = self.all["window"]
        assert isinstance(window, Window)
        self.window = window
        known = {} if options.chosen is None else options.chosen
        if options.group not in known:
            known[options.group] = {way: self.choose(way) for way in WAYS}
        self.chosen: dict[str, list[str]] = known[options.group]

    def zeros(self, shape: tuple[int, ...], dtype: Any, label: str) -> Array:
        return self.window.zeros(shape, dtype, label)

    def choose(self, way: str) -> list[str]:
        """Return the fastest algorithm's name for each of SIZES. Comm: sums of each size."""
        names = []
        count = (SIZES[-1] // 4,)
        largest = (np.zeros(count, np.float32) if way == "own"
                   else self.zeros(count, np.float32, "buffers"))
        for size in SIZES:
            x = largest[:size // 4]
            times = np.array([median(column) for column in zip(*(
                [self.timed(one, x, way) for one in self.all.values()] for _ in range(ROUNDS)),
                strict=True)])
            self.mpi.Allreduce(self.in_place, times, self.reduce_ops["max"])
            best = int(np.argmin(times))
            own = [*self.all].index("mpi")
            names.append([*self.all][best if times[best] < MARGIN * times[own] else own])
        return names

    def timed(self, one: MpiOwn, x: Array, way: str) -> float:
        """Return the seconds of a sum; one in the window is posted, as those of gradients are."""
        self.mpi.Barrier()
        start = perf_counter()
        if way == "own":
            one.all_reduce(x, "sum")
        else:
            one.iall_reduce(x).Wait()
        return perf_counter() - start

    def of(self, x: Array) -> MpiOwn:
        """Return the algorithm for an array: the one of the nearest of SIZES."""
        way = WAYS[self.window.find(x) is not None]
        nearest = (max(x.nbytes, SIZES[0]) // SIZES[0]).bit_length() // 2
        return self.all[self.chosen[way][min(nearest, len(SIZES) - 1)]]

    def all_reduce(self, x: Array, op: str) -> None:
        self.of(x).all_reduce(x, op)

    def all_gather(self, x: Array, y: Array) -> None:
        self.of(y).all_gather(x, y)

    def reduce_scatter(self, x: Array, y: Array) -> None:
        self.of(x).reduce_scatter(x, y)

    def iall_reduce(self, x: Array) -> Request:
        return self.of(x).iall_reduce(x)

    def ireduce_scatter(self, x: Array) -> Request:
        return self.of(x).ireduce_scatter(x)

    def iall_gather(self, x: Array) -> Request:
        return self.of(x).iall_gather(x)

    def close(self) -> None:
        for one in self.all.values():
            one.close()
