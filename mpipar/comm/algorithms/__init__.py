"""Algorithms of all-reduce over a group, a file and a row each, for training and benchmarks.

`--all-reduce` names a row. `levels` is not among them, because it consists of groups: see
`mpipar.comm.levels`.
"""

from mpipar.comm.algorithms.doubling import Doubling
from mpipar.comm.algorithms.halves import Halves
from mpipar.comm.algorithms.mpi_library import MpiOwn
from mpipar.comm.algorithms.ring import Ring
from mpipar.comm.algorithms.window import Window

ALGORITHMS: dict[str, type[MpiOwn]] = {
    "mpi": MpiOwn,
    "ring": Ring,
    "doubling": Doubling,
    "halves": Halves,
    "window": Window,
}
