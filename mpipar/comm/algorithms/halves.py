"""A reduce-scatter and an all-gather, each as MPI makes it: a sum in two collectives.

Each rank sums one piece and gathers the others. It sends what a ring does. Source: Rabenseifner,
doi 10.1007/978-3-540-24685-5_1.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.comm.algorithms.steps import Steps, Stepwise
from mpipar.comm.request import Array, Options

if TYPE_CHECKING:
    from mpi4py import MPI


class Halves(Stepwise):
    """Sums by a reduce-scatter of pieces and an all-gather. Comm: one Dup more.

    Each of the two kinds of collectives has a communicator, on which all ranks post them in one
    order, that of the operations.
    """

    def __init__(self, ops: Any, mpi_comm: MPI.Intracomm, options: Options):
        super().__init__(ops, mpi_comm, options)
        self.gathers = mpi_comm.Dup()
        self.before = deque()

    def summed(self, x: Array) -> Steps:
        pieces = self.pieces(x)
        counts, own = [len(one) for one in pieces], np.empty_like(pieces[self.index])
        yield self.own.Ireduce_scatter(x, own, counts)
        pieces[self.index][:] = own
        yield self.gathers.Iallgatherv(self.in_place, [x, counts])

    def close(self) -> None:
        self.gathers.Free()
        super().close()
