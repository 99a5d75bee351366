"""A sum in two of MPI's collectives: a reduce-scatter and an all-gather.

Each rank sums one piece and gathers the others. It sends as much as with a ring. Source:
Rabenseifner, doi 10.1007/978-3-540-24685-5_1.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from mpipar.comm.algorithms.mpi_library import New
from mpipar.comm.algorithms.steps import Steps, StepwiseTransport
from mpipar.comm.request import Options
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array

if TYPE_CHECKING:
    from mpi4py import MPI


class RabenseifnerTransport(StepwiseTransport):
    """Sums by a reduce-scatter of pieces and an all-gather. Comm: one additional Dup.

    Each of the two kinds of collectives has its own communicator, on which all ranks post them in
    the same order, that of the operations.
    """

    def __init__(self, ops: Ops, mpi_comm: MPI.Comm, options: Options, new: New | None = None):
        super().__init__(ops, mpi_comm, options, new)
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
