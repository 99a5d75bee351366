"""Algorithms of all-reduce over a group, a class and a row each, for training and benchmarks.

An algorithm is a transport. `--all-reduce` names a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mpipar.comm.algorithms.mpi_library import MpiTransport
from mpipar.comm.algorithms.steps import (
    HierarchicalTransport,
    RabenseifnerTransport,
    RecursiveDoublingTransport,
    RingTransport,
    is_hierarchical,
    ranks_on_hosts,
)
from mpipar.comm.algorithms.window import WindowTransport

if TYPE_CHECKING:
    from mpi4py import MPI

ALGORITHMS: dict[str, type[MpiTransport]] = {
    "mpi": MpiTransport,
    "ring": RingTransport,
    "doubling": RecursiveDoublingTransport,
    "halves": RabenseifnerTransport,
    "levels": HierarchicalTransport,
    "window": WindowTransport,
}
BY_HOST = ("levels", "window")  # those that depend on the hosts of a group


def algorithm_for(mpi_comm: MPI.Comm, name: str) -> Callable[..., MpiTransport]:
    """Return the algorithm of a row for the hosts that a group spans.

    A window is the memory of one host. Between hosts there are two levels, or MPI where these make
    no sense. Comm: for the rows of BY_HOST, that of `ranks_on_hosts`.
    """
    if name not in BY_HOST:
        return ALGORITHMS[name]
    counts = ranks_on_hosts(mpi_comm)
    inside = WindowTransport if name == "window" else MpiTransport
    if counts[0] == len(counts):
        return inside
    return (
        partial(HierarchicalTransport, inside=inside) if is_hierarchical(counts) else MpiTransport
    )
