"""The desync guard: before each collective the ranks of a group agree that they make the same call.

MPI does not check this: ranks that meet in different collectives hang, or one of them returns
garbage. The guard sits between a Comm and its transport and reads what is about to be called from
the record that the Comm has just opened. Its own messages travel on a communicator of their own and
are not in the records.
"""

from __future__ import annotations

import zlib

import numpy as np

from mpipar.comm.record import DTYPE, NAME, OPERATION, PAYLOAD, SEQ, SITE, place
from mpipar.errors import HangError

TEXT_BYTES = 400  # of one rank's description, when they differ


class CheckedTransport:
    """A transport whose collectives are first compared over the group.

    Raises HangError on every rank of the group, with the same text that says who calls what, when
    they differ. Comm: one all-reduce of 16 bytes before each collective, and one all-gather when
    they differ.
    """

    def __init__(self, wire, mpi_comm, ranks, recorder):
        self.wire, self.ranks, self.recorder = wire, ranks, recorder
        self.mpi = mpi_comm.Dup()

    def __getattr__(self, name):
        return getattr(self.wire, name)  # sends, receives and limits pass

    def all_reduce(self, x, op):
        self._agree()
        self.wire.all_reduce(x, op)

    def iall_reduce(self, x):
        self._agree()
        return self.wire.iall_reduce(x)

    def all_gather(self, x, group_size):
        self._agree()
        return self.wire.all_gather(x, group_size)

    def reduce_scatter(self, x):
        self._agree()
        return self.wire.reduce_scatter(x)

    def all_to_all(self, x):
        self._agree()
        return self.wire.all_to_all(x)

    def broadcast(self, x, root):
        self._agree()
        self.wire.broadcast(x, root)

    def reduce(self, x, root):
        self._agree()
        self.wire.reduce(x, root)

    def barrier(self):
        self._agree()
        self.wire.barrier()

    def close(self):
        self.mpi.Free()
        self.wire.close()

    def _agree(self) -> None:
        record = self.recorder.records[-1]
        what = f"{record[OPERATION]} {record[NAME]} {record[DTYPE]} {record[PAYLOAD]} bytes"
        own = zlib.crc32(what.encode())
        ends = np.array([own, -own], np.int64)
        from mpi4py import MPI

        self.mpi.Allreduce(MPI.IN_PLACE, ends, op=MPI.MAX)
        if ends[0] == -ends[1]:
            return
        text = f"{what} at {place(*record[SITE])}".encode()[:TEXT_BYTES]
        texts = np.zeros((len(self.ranks), TEXT_BYTES), np.uint8)
        texts[self.mpi.rank, :len(text)] = np.frombuffer(text, np.uint8)
        self.mpi.Allgather(MPI.IN_PLACE, texts)
        calls = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in texts]
        common = max(set(calls), key=calls.count)
        lines = [f"ranks disagree at collective {record[SEQ]} of the group {list(self.ranks)}"]
        lines += [f"rank {world_rank} calls {call}{'' if call == common else '   <- differs'}"
                  for world_rank, call in zip(self.ranks, calls, strict=True)]
        raise HangError(lines)
