"""Algorithms of all-reduce over a group, a file and a row each, for training and benchmarks.

An algorithm is a transport. `--all-reduce` names a row. `levels` is not among them, because it
consists of groups: see `mpipar.comm.levels`.
"""

from mpipar.comm.algorithms.doubling import DoublingTransport
from mpipar.comm.algorithms.halves import HalvesTransport
from mpipar.comm.algorithms.mpi_library import MpiTransport
from mpipar.comm.algorithms.ring import RingTransport
from mpipar.comm.algorithms.window import WindowTransport

ALGORITHMS: dict[str, type[MpiTransport]] = {
    "mpi": MpiTransport,
    "ring": RingTransport,
    "doubling": DoublingTransport,
    "halves": HalvesTransport,
    "window": WindowTransport,
}
