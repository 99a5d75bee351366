"""MPI's own collectives: the MPI library chooses the algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpipar.comm.request import Array, Options, Request

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiOwn:
    """Leaves the algorithm of sums and gathers to MPI. Base class of all other algorithms.

    all_reduce works in place; all_gather, reduce_scatter and all_to_all go from x to y. Posted
    operations work in place: ireduce_scatter leaves this rank's part of the sum in x[0], and
    iall_gather finds this rank's part in x[index].
    """

    def __init__(self, ops: Any, mpi_comm: MPI.Intracomm, options: Options):
        from mpi4py import MPI

        self.ops, self.mpi, self.options = ops, mpi_comm, options
        self.in_place = MPI.IN_PLACE
        self.reduce_ops = {"sum": MPI.SUM, "max": MPI.MAX}

    def zeros(self, shape: tuple[int, ...], dtype: Any, label: str) -> Array:
        """Return a new array of zeros, in the memory that is best for its sums."""
        return self.ops.zeros(shape, dtype, label=label)

    def all_reduce(self, x: Array, op: str) -> None:
        self.mpi.Allreduce(self.in_place, x, self.reduce_ops[op])

    def all_gather(self, x: Array, y: Array) -> None:
        self.mpi.Allgather(x, y)

    def reduce_scatter(self, x: Array, y: Array) -> None:
        self.mpi.Reduce_scatter_block(x, y)

    def all_to_all(self, x: Array, y: Array) -> None:
        self.mpi.Alltoall(x, y)

    def iall_reduce(self, x: Array) -> Request:
        request: Request = self.mpi.Iallreduce(self.in_place, x)
        return request

    def ireduce_scatter(self, x: Array) -> Request:
        request: Request = self.mpi.Ireduce_scatter_block(self.in_place, x)
        return request

    def iall_gather(self, x: Array) -> Request:
        request: Request = self.mpi.Iallgather(self.in_place, x)
        return request

    def close(self) -> None:
        """Free what the algorithm has allocated. Comm: every member."""
