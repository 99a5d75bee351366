"""The desync check: before each collective, a group's ranks verify that they make the same call.

MPI does not check this: ranks that meet in different collectives hang, or one of them returns
garbage. With --check-comm, a Comm passes the record of each call to the check before it makes the
call. The check sends its messages on a communicator of its own and keeps them out of the records.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from mpipar.comm.objects import all_gather_objects
from mpipar.comm.record import Record
from mpipar.errors import HangError

if TYPE_CHECKING:
    from mpi4py import MPI

UNEVEN = ("all_to_allv",)  # operations in which ranks send different numbers of bytes


class CollectiveCheck:
    """Compares a call over the group `ranks`. mpi_comm: their communicator, used only for this.

    The operation and its number in the group, name, type and root must be equal, and the bytes too
    unless the operation is uneven. If they differ, raises HangError on every rank of the group,
    with the same text everywhere: which rank makes which call.
    Comm: one all-reduce of 16 bytes for each collective, and a gather of texts when they differ.
    """

    def __init__(self, mpi_comm: MPI.Comm, ranks: tuple[int, ...]):
        self.mpi, self.ranks = mpi_comm, ranks
        self.number = 0  # of the check: the same on every rank

    def __call__(self, record: Record) -> None:
        self.number += 1
        what = f"{record.operation} {record.name} {record.dtype}"
        if record.operation not in UNEVEN:
            what += f" {record.payload_bytes} bytes"
        if record.peer >= 0:
            what += f" root {self.ranks[record.peer]}"
        own = zlib.crc32(f"{record.seq} {what}".encode())
        ends = np.array([own, -own], np.int64)
        from mpi4py import MPI

        self.mpi.Allreduce(MPI.IN_PLACE, ends, op=MPI.MAX)
        if ends[0] == -ends[1]:
            return
        calls = all_gather_objects(self.mpi, f"{what} at {record.source}, collective {record.seq}")
        common = max(calls, key=calls.count)
        lines = [
            f"rank {world_rank} calls {call}{'' if call == common else '   <- differs'}"
            for world_rank, call in zip(self.ranks, calls, strict=True)
        ]
        head = f"ranks disagree at collective {self.number} of the group {list(self.ranks)}"
        raise HangError([head, *lines])

    def close(self) -> None:
        """Free the communicator. Comm: every member."""
        self.mpi.Free()
