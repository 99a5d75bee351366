"""The desync check: before each collective the ranks of a group agree that they make the same call.

MPI does not check this: ranks that meet in different collectives hang, or one of them returns
garbage. With --check-comm, a Comm hands over the record of each call before it makes it. The check
sends its messages on a communicator of its own and keeps them out of the records.
"""

from __future__ import annotations

import zlib

import numpy as np

from mpipar.comm.record import Record
from mpipar.errors import HangError

TEXT_BYTES = 400  # of one rank's description, when they differ


class CallCheck:
    """Compares a call over the group `ranks`. mpi_comm: their communicator, for this alone.

    Raises HangError on every rank of the group when they differ. Its text is the same everywhere
    and says who calls what.
    Comm: one all-reduce of 16 bytes for each collective, and one all-gather when they differ.
    """

    def __init__(self, mpi_comm, ranks):
        self.mpi, self.ranks = mpi_comm, ranks

    def __call__(self, record: Record) -> None:
        what = f"{record.operation} {record.name} {record.dtype} {record.payload_bytes} bytes"
        own = zlib.crc32(what.encode())
        ends = np.array([own, -own], np.int64)
        from mpi4py import MPI

        self.mpi.Allreduce(MPI.IN_PLACE, ends, op=MPI.MAX)
        if ends[0] == -ends[1]:
            return
        text = f"{what} at {record.source}".encode()[:TEXT_BYTES]
        texts = np.zeros((len(self.ranks), TEXT_BYTES), np.uint8)
        texts[self.mpi.rank, :len(text)] = np.frombuffer(text, np.uint8)
        self.mpi.Allgather(MPI.IN_PLACE, texts)
        calls = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in texts]
        common = max(set(calls), key=calls.count)
        lines = [f"ranks disagree at collective {record.seq} of the group {list(self.ranks)}"]
        lines += [f"rank {world_rank} calls {call}{'' if call == common else '   <- differs'}"
                  for world_rank, call in zip(self.ranks, calls, strict=True)]
        raise HangError(lines)

    def close(self) -> None:
        self.mpi.Free()
