"""MPI's own calls on host memory, which a rank waits for without occupying a core that others need.

A transport's method is the algorithm; here the library chooses it.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipar.comm.transport import Counts, Exchanged, New, Options, Request
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Shape

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike

POLLS_BEFORE_SLEEP = 20  # no sleep for a message that has nearly arrived
SLEEP_SECONDS, MOST_SLEEP_SECONDS = 50e-6, 200e-6  # the first between two polls, and the longest


class PollingRequest:
    """A message that is polled with short sleeps, for hosts with more ranks than cores.

    MPI's own wait spins, and occupies the core that the awaited rank needs. Measured with 4 ranks
    on 2 cores: the default run's step takes 76 ms with sleeps of 50 us and 85 ms with Wait. Polls
    use some of the core too, so the sleeps of a long wait grow longer, which saves another 3 % of
    this step, and 7 % of that of 1f1b on four stages. Collectives stay with MPI, because their
    members arrive less than one sleep apart. Sums over ranks that hold different stages are the
    exception.
    """

    def __init__(self, request: Request):
        self.request = request
        self.Test = request.Test

    def Wait(self) -> None:
        for _ in range(POLLS_BEFORE_SLEEP):
            if self.request.Test():
                return
        nap = SLEEP_SECONDS
        while not self.request.Test():
            time.sleep(nap)
            nap = min(2 * nap, MOST_SLEEP_SECONDS)


class MpiTransport:
    """Hands arrays straight to MPI, whose library chooses the algorithm; others replace methods.

    Only upper-case mpi4py calls on buffers are used.

    new: makes an array to receive into; by default it is one of `ops`.
    """

    carrier, in_order = "MPI", False

    def __init__(self, ops: Ops, mpi_comm: MPI.Comm, options: Options, new: New | None = None):
        from mpi4py import MPI

        self.ops, self.mpi, self.options = ops, mpi_comm, options
        self.new = new or partial(ops.empty, label="buffers")
        self.in_place, self.reduce_ops = MPI.IN_PLACE, {"sum": MPI.SUM, "max": MPI.MAX}
        # Synchronous sends are done only when matched. A program that works with them never relies
        # on buffers inside MPI, whatever the message size.
        self.mpi_isend = mpi_comm.Issend if options.sync_sends else mpi_comm.Isend
        self.tag_ub: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # Open MPI sets it only there

    def zeros(self, shape: Shape, dtype: DTypeLike, label: str) -> Array:
        return self.ops.zeros(shape, dtype, label=label)

    def all_reduce(self, x: Array, op: str) -> None:
        """Sum x or take the maximum, in place. A rank that is early sleeps until all are here.

        Measured with 4 ranks on 2 cores, with and without it in turns: steps of gpipe take 13 %
        less time, and those of 1f1b 5 %.
        """
        if self.options.yields_cpu and self.options.uneven:
            PollingRequest(self.mpi.Ibarrier()).Wait()
        self.mpi.Allreduce(self.in_place, x, self.reduce_ops[op])

    def iall_reduce(self, x: Array) -> Request:
        return self.mpi.Iallreduce(self.in_place, x)

    def all_gather(self, x: Array, group_size: int) -> Array:
        y = self.new((group_size, *x.shape), x.dtype)
        self.mpi.Allgather(x, y)
        return y

    def iall_gather(self, x: Array) -> Request:
        return self.mpi.Iallgather(self.in_place, x)

    def reduce_scatter(self, x: Array) -> Array:
        y = self.new(x.shape[1:], x.dtype)
        self.mpi.Reduce_scatter_block(x, y)
        return y

    def ireduce_scatter(self, x: Array) -> Request:
        return self.mpi.Ireduce_scatter_block(self.in_place, x)

    def all_to_all(self, x: Array) -> Array:
        y = self.new(x.shape, x.dtype)
        self.mpi.Alltoall(x, y)
        return y

    def all_to_allv(self, x: Array, counts: Counts, received: Counts | None) -> Exchanged:
        if received is None:
            received = self.counts_from(counts)
        y = self.new((sum(received), *x.shape[1:]), x.dtype)
        width = math.prod(x.shape[1:])
        self.mpi.Alltoallv(
            (x, [width * count for count in counts]), (y, [width * count for count in received])
        )
        return y, received

    def counts_from(self, counts: Counts) -> list[int]:
        """Return the rows that each rank sends here. counts: rows for each. Comm: one Alltoall."""
        received = np.empty(len(counts), np.int64)
        self.mpi.Alltoall(np.array(counts, np.int64), received)
        return [int(count) for count in received]

    def broadcast(self, x: Array, root: int) -> None:
        self.mpi.Bcast(x, root)  # mpi4py takes 0.2 us longer for a keyword

    def reduce(self, x: Array, root: int) -> None:
        here = self.mpi.rank == root
        self.mpi.Reduce(self.in_place if here else x, x if here else None, root=root)

    def barrier(self) -> None:
        self.mpi.Barrier()

    def isend(self, x: Array, peer: int, tag: int) -> Request:
        return self.polled(self.mpi_isend(x, peer, tag))

    def irecv(self, x: Array, peer: int, tag: int) -> Request:
        return self.polled(self.mpi.Irecv(x, peer, tag))

    def polled(self, request: Request) -> Request:
        """Return a request during whose wait this rank sleeps, if ranks share cores."""
        return PollingRequest(request) if self.options.yields_cpu else request

    def max_tag(self) -> int:
        return int(self.tag_ub)

    def close(self) -> None:
        self.mpi.Free()
