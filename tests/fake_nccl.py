"""Stands in for cupy.cuda.nccl over MPI: the calls of bench/interconnect/nccl.py, by address.

On a GPU, messages outside of a group or without a partner in the same group would hang. Here
messages are posted when the group ends, and waited for at once.
"""

import ctypes

import numpy as np
from mpi4py import MPI

NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM, NCCL_MAX = 7, 8, 0, 2
DTYPES = {NCCL_FLOAT32: np.float32, NCCL_FLOAT64: np.float64}
OPS = {NCCL_SUM: MPI.SUM, NCCL_MAX: MPI.MAX}
posted = []


def get_unique_id():
    return bytes(range(128))


def groupStart():
    assert not posted


def groupEnd():
    MPI.Request.Waitall([call() for call in posted])
    posted.clear()


def array(address, count, kind):
    dtype = np.dtype(DTYPES[kind])
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


class NcclCommunicator:
    """One group, the world's: the tests need no other."""

    def __init__(self, size, key, rank):
        assert key == get_unique_id()
        self.mpi = MPI.COMM_WORLD.Dup()
        assert (size, rank) == (self.mpi.size, self.mpi.rank)

    def allReduce(self, source, target, count, kind, op, stream):
        assert source == target
        self.mpi.Allreduce(MPI.IN_PLACE, array(target, count, kind), op=OPS[op])

    def allGather(self, source, target, count, kind, stream):
        self.mpi.Allgather(array(source, count, kind), array(target, count * self.mpi.size, kind))

    def reduceScatter(self, source, target, count, kind, op, stream):
        self.mpi.Reduce_scatter_block(
            array(source, count * self.mpi.size, kind), array(target, count, kind), op=OPS[op])

    def broadcast(self, source, target, count, kind, root, stream):
        assert source == target
        self.mpi.Bcast(array(target, count, kind), root=root)

    def reduce(self, source, target, count, kind, op, root, stream):
        here = self.mpi.rank == root
        x = array(target, count, kind)
        self.mpi.Reduce(MPI.IN_PLACE if here else x, x if here else None, op=OPS[op], root=root)

    def send(self, source, count, kind, peer, stream):
        posted.append(lambda: self.mpi.Isend(array(source, count, kind), peer))

    def recv(self, target, count, kind, peer, stream):
        posted.append(lambda: self.mpi.Irecv(array(target, count, kind), peer))

    def destroy(self):
        self.mpi.Free()
