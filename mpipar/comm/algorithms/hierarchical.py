"""Two levels: inside each host, across the hosts, and inside again.

Each rank of a host sums one share, and the ranks with the same share sum it across the hosts, so
that only a share of a rank's bytes crosses the slow links. Then the shares are gathered inside the
host.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from mpipar.comm.algorithms.mpi_library import MpiTransport, New
from mpipar.comm.algorithms.steps import Steps, StepwiseTransport
from mpipar.comm.grid import chunk_size
from mpipar.comm.objects import all_gather_objects
from mpipar.comm.request import Options
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Shape

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike


class HierarchicalTransport(StepwiseTransport):
    """Sums in two levels; see `is_hierarchical` for the groups that it serves.

    inside: what sums and gathers inside a host.
    Comm: a split by host and one across hosts, and a Dup.
    """

    def __init__(
        self,
        ops: Ops,
        mpi_comm: MPI.Comm,
        options: Options,
        new: New | None = None,
        inside: type[MpiTransport] = MpiTransport,
    ):
        super().__init__(ops, mpi_comm, options, new)
        host = host_of(mpi_comm)
        self.share, self.shares = host.rank, host.size
        self.intra = inside(ops, host, options, new)
        self.inter = MpiTransport(ops, mpi_comm.Split(host.rank), options, new)
        # What is posted after a sum across hosts starts at a different time on each rank of a host,
        # so it needs its own communicator.
        self.intra2 = MpiTransport(ops, host.Dup(), options, new)
        self.before = deque()

    def summed(self, x: Array) -> Steps:
        parts = x
        if len(x) % self.shares:
            parts = np.zeros(self.shares * chunk_size(len(x), self.shares), x.dtype)
            parts[: len(x)] = x
        parts = parts.reshape(self.shares, -1)
        yield self.intra.ireduce_scatter(parts)
        yield self.inter.iall_reduce(parts[0])
        if self.share > 0:
            parts[self.share] = parts[0]
        yield self.intra2.iall_gather(parts)
        if len(x) % self.shares:
            x[:] = parts.reshape(-1)[: len(x)]

    def zeros(self, shape: Shape, dtype: DTypeLike, label: str) -> Array:
        return self.intra.zeros(shape, dtype, label)

    def close(self) -> None:
        for level in (self.intra, self.inter, self.intra2):
            level.close()
        super().close()


def host_of(mpi_comm: MPI.Comm) -> MPI.Comm:
    """Return the communicator of a group's ranks on this host. Comm: a split of the group."""
    from mpi4py import MPI

    return mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)


def ranks_on_hosts(mpi_comm: MPI.Comm) -> list[int]:
    """Return how many of a group's ranks are on the host of each. Comm: a split and a gather."""
    host = host_of(mpi_comm)
    count = host.size
    host.Free()
    return all_gather_objects(mpi_comm, count)


def is_hierarchical(counts: list[int]) -> bool:
    """Return whether two levels make sense: several hosts with equally many ranks, two or more.

    counts: see `ranks_on_hosts`.
    """
    return 1 < counts[0] < len(counts) and len({*counts}) == 1
