"""`auto`: measures the algorithms briefly, and uses the fastest one for each array size.

Each group measures on its own, but all groups of an axis at the same time, as in a step. The
largest time of any of its ranks counts, so they all make the same choice. Each collective is
measured separately, and so are sums of arrays in the window, because they need no copies. The
choice is passed to the caller and kept with the run: see `Options.chosen`.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.comm.algorithms.mpi_library import MpiOwn
from mpipar.comm.algorithms.window import Window
from mpipar.comm.request import Array, Options, Request

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = tuple(1 << power for power in range(12, 23, 2))  # bytes: 4 KiB to 4 MiB
ROUNDS = 7  # of each algorithm and size, in turns
MARGIN = 0.9  # of MPI's time: a smaller gain does not justify another order of a sum
# What is measured, for x and y (ranks, n). own: a sum of an array anywhere. window: a sum of an
# array in the window, posted as those of gradients are.
CALLS: dict[str, Callable[[MpiOwn, Array, Array], None]] = {
    "own": lambda one, x, y: one.all_reduce(x, "sum"),
    "window": lambda one, x, y: one.iall_reduce(x).Wait(),
    "all_gather": lambda one, x, y: one.all_gather(x[0], y),
    "reduce_scatter": lambda one, x, y: one.reduce_scatter(x, y[0]),
}


class Auto(MpiOwn):
    """Hands each operation to the algorithm that was chosen for its size.

    kinds: {name: class}. Comm: that of all of them, and the measurement unless its result is known.
    """

    def __init__(
        self, ops: Any, mpi_comm: MPI.Intracomm, options: Options, kinds: dict[str, type[MpiOwn]]
    ):
        super().__init__(ops, mpi_comm, options)
        self.all = {name: kind(ops, mpi_comm, options) for name, kind in kinds.items()}
        window = self.all["window"]
        assert isinstance(window, Window)
        self.window = window
        known = {} if options.chosen is None else options.chosen
        self.chosen: dict[str, list[str]] = known.setdefault(options.group, {})
        for call in CALLS:
            if call not in self.chosen:
                self.chosen[call] = self.choose(call)

    def zeros(self, shape: tuple[int, ...], dtype: Any, label: str) -> Array:
        return self.window.zeros(shape, dtype, label)

    def choose(self, call: str) -> list[str]:
        """Return the fastest algorithm's name for each of SIZES.

        Comm: ROUNDS calls of each size and algorithm, and an all_reduce of their times.
        """
        names, shape = [], (self.mpi.size, SIZES[-1] // 4 // self.mpi.size)
        y = np.zeros(shape, np.float32)
        x = self.zeros(shape, np.float32, "buffers") if call == "window" else np.zeros_like(y)
        for size in SIZES:
            flat = slice(size // 4 // self.mpi.size * self.mpi.size)
            given, taken = (one.reshape(-1)[flat].reshape(self.mpi.size, -1) for one in (x, y))
            times = np.array(
                [
                    median(column)
                    for column in zip(
                        *(
                            [self.timed(one, call, given, taken) for one in self.all.values()]
                            for _ in range(ROUNDS)
                        ),
                        strict=True,
                    )
                ]
            )
            self.mpi.Allreduce(self.in_place, times, self.reduce_ops["max"])
            best = int(np.argmin(times))
            own = [*self.all].index("mpi")
            names.append([*self.all][best if times[best] < MARGIN * times[own] else own])
        return names

    def timed(self, one: MpiOwn, call: str, x: Array, y: Array) -> float:
        """Return the seconds of a call. Comm: a barrier, and the call."""
        self.mpi.Barrier()
        start = perf_counter()
        CALLS[call](one, x, y)
        return perf_counter() - start

    def best(self, call: str, nbytes: int) -> MpiOwn:
        """Return the algorithm for a call: that of the nearest of SIZES."""
        nearest = (max(nbytes, SIZES[0]) // SIZES[0]).bit_length() // 2
        return self.all[self.chosen[call][min(nearest, len(SIZES) - 1)]]

    def of(self, x: Array) -> MpiOwn:
        """Return the algorithm for sums of an array, and for all posted operations on it."""
        return self.best("own" if self.window.find(x) is None else "window", x.nbytes)

    def all_reduce(self, x: Array, op: str) -> None:
        self.of(x).all_reduce(x, op)

    def all_gather(self, x: Array, y: Array) -> None:
        self.best("all_gather", y.nbytes).all_gather(x, y)

    def reduce_scatter(self, x: Array, y: Array) -> None:
        self.best("reduce_scatter", x.nbytes).reduce_scatter(x, y)

    def iall_reduce(self, x: Array) -> Request:
        return self.of(x).iall_reduce(x)

    def ireduce_scatter(self, x: Array) -> Request:
        return self.of(x).ireduce_scatter(x)

    def iall_gather(self, x: Array) -> Request:
        return self.of(x).iall_gather(x)

    def close(self) -> None:
        for one in self.all.values():
            one.close()
