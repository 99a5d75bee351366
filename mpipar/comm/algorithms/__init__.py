"""Algorithms of all-reduce over a group, a class and a row each, for training and benchmarks.

An algorithm is a transport. `--all-reduce` names a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpipar.comm.algorithms.steps import (
    RabenseifnerTransport,
    RecursiveDoublingTransport,
    RingTransport,
)
from mpipar.comm.algorithms.window import WindowTransport
from mpipar.comm.mpi import MpiTransport

if TYPE_CHECKING:
    from mpi4py import MPI

ALGORITHMS: dict[str, type[MpiTransport]] = {
    "mpi": MpiTransport,
    "ring": RingTransport,
    "doubling": RecursiveDoublingTransport,
    "halves": RabenseifnerTransport,
    "window": WindowTransport,
}


def algorithm_for(mpi_comm: MPI.Comm, name: str) -> type[MpiTransport]:
    """Return the algorithm of a row for a group. A window is the memory of one host: else MPI's.

    Comm: for a window, a split.
    """
    if name == "window":
        host = host_of(mpi_comm)
        name = "window" if host.size == mpi_comm.size else "mpi"
        host.Free()
    return ALGORITHMS[name]


def host_of(mpi_comm: MPI.Comm) -> MPI.Comm:
    """Return the communicator of a group's ranks on this host. Comm: a split of the group."""
    from mpi4py import MPI

    return mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
