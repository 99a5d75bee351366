"""The world of a process that runs alone, where no MPI library can be loaded."""

from __future__ import annotations

import os
from typing import Any


class OneRank:
    """The calls of an mpi4py communicator, for rank 0 of 1: it receives what it sends.

    why: what kept MPI from being loaded. NumPy is not imported, because its threads are not yet
    set.
    """

    def __init__(self, why: str):
        self.rank, self.size, self.why = 0, 1, why

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def Dup(self) -> OneRank:
        return self

    def Split(self, color: int = 0, key: int = 0) -> OneRank:
        return self

    def Allgather(self, x: Any, into: Any) -> None:
        """Copy the bytes of a buffer into another one of the same size."""
        memoryview(into).cast("B")[:] = memoryview(x).cast("B")

    Allreduce = Allgather

    def Bcast(self, x: Any, root: int = 0) -> None:
        """Leave the buffer as it is."""

    def Barrier(self) -> None:
        """Return at once."""

    def Ibarrier(self) -> OneRank:
        """Return a request that is done: itself."""
        return self

    def Test(self) -> bool:
        return True

    def Free(self) -> None:
        """Do nothing: nothing was allocated."""

    def Abort(self, code: int) -> None:
        os._exit(code)
