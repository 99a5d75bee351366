"""MPI's own collectives and messages: the MPI library chooses the algorithm.

Only upper-case mpi4py calls on buffers are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpipar.comm.transport import Counts, Exchanged, Options, PollingRequest, Request
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Shape

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike

New: TypeAlias = Callable[[Shape, "DTypeLike"], Array]  # makes an array


class MpiTransport:
    """Hands arrays straight to MPI. All other algorithms replace some of its methods.

    new: makes an array to receive into; by default it is one of `ops`.
    """

    carrier, in_order = "MPI", False

    def __init__(
        self,
        ops: Ops,
        mpi_comm: MPI.Comm,
        options: Options,
        new: New | None = None,
    ):
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

        Measured with 4 ranks on 2 cores, alternating without and with that: steps of gpipe take 13
        % less time, and those of 1f1b 5 %.
        """
        if self.options.yields_cpu and self.options.uneven:
            PollingRequest(self.mpi.Ibarrier()).Wait()
        self.mpi.Allreduce(self.in_place, x, self.reduce_ops[op])

    def iall_reduce(self, x: Array) -> Request:
        request: Request = self.mpi.Iallreduce(self.in_place, x)
        return request

    def all_gather(self, x: Array, group_size: int) -> Array:
        y = self.new((group_size, *x.shape), x.dtype)
        self.mpi.Allgather(x, y)
        return y

    def iall_gather(self, x: Array) -> Request:
        request: Request = self.mpi.Iallgather(self.in_place, x)
        return request

    def reduce_scatter(self, x: Array) -> Array:
        y = self.new(x.shape[1:], x.dtype)
        self.mpi.Reduce_scatter_block(x, y)
        return y

    def ireduce_scatter(self, x: Array) -> Request:
        request: Request = self.mpi.Ireduce_scatter_block(self.in_place, x)
        return request

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
