"""NCCL behind the calls of a transport, for comparison with MPI: device memory alone.

NCCL has no tags and no requests. Messages are queued on a stream, and those that must progress
together must be posted together. So a message is held here until this rank waits for one; then all
held messages go in one group.
"""

from __future__ import annotations

from mpipar.comm.transport import Done, HostTransport

KEY_BYTES = 128  # of NCCL's unique id, which has the type bytes since CuPy 14


class Posted:
    """A message that is sent together with its group."""

    def __init__(self, wire):
        self.wire = wire

    def Test(self):
        self.wire.go()
        return True

    def Wait(self):
        self.wire.go()


class NcclTransport(HostTransport):
    """CuPy arrays through CuPy's NCCL. Every call returns when its result can be used."""

    def __init__(self, ops, mpi_comm, options):
        super().__init__(ops, mpi_comm, options)
        self.nccl, self.posted = ops.xp.cuda.nccl, []
        key = bytearray(KEY_BYTES)
        if mpi_comm.rank == 0:
            key[:] = self.nccl.get_unique_id()
        mpi_comm.Bcast(key)
        self.group = self.nccl.NcclCommunicator(mpi_comm.size, bytes(key), mpi_comm.rank)
        self.kind = {"float32": self.nccl.NCCL_FLOAT32, "float64": self.nccl.NCCL_FLOAT64}[
            str(ops.dtype)]
        self.sums = {"sum": self.nccl.NCCL_SUM, "max": self.nccl.NCCL_MAX}

    @property
    def stream(self):
        """The current stream's address."""
        return self.ops.xp.cuda.get_current_stream().ptr

    def go(self) -> None:
        """Post all waiting messages in one group and wait for them."""
        posted, self.posted = self.posted, []
        self.nccl.groupStart()
        for call, x, peer in posted:
            call(x.data.ptr, x.size, self.kind, peer, self.stream)
        self.nccl.groupEnd()
        self.ops.synchronize()

    def all_reduce(self, x, op):
        self.group.allReduce(x.data.ptr, x.data.ptr, x.size, self.kind, self.sums[op], self.stream)
        self.ops.synchronize()

    def iall_reduce(self, x):
        self.all_reduce(x, "sum")
        return Done()

    def ireduce_scatter(self, x):
        self.ops.copy(x[0], self.reduce_scatter(x))
        self.ops.synchronize()
        return Done()

    def iall_gather(self, x):
        own = x[self.mpi.rank]
        self.group.allGather(own.data.ptr, x.data.ptr, own.size, self.kind, self.stream)
        self.ops.synchronize()
        return Done()

    def all_gather(self, x, group_size):
        y = self.ops.empty((group_size, *x.shape), x.dtype, label="buffers")
        self.group.allGather(x.data.ptr, y.data.ptr, x.size, self.kind, self.stream)
        self.ops.synchronize()
        return y

    def reduce_scatter(self, x):
        y = self.ops.empty(x.shape[1:], x.dtype, label="buffers")
        self.group.reduceScatter(
            x.data.ptr, y.data.ptr, y.size, self.kind, self.sums["sum"], self.stream)
        self.ops.synchronize()
        return y

    def all_to_all(self, x):
        y = self.ops.empty(x.shape, x.dtype, label="buffers")
        for peer in range(len(x)):
            self.posted += [(self.group.send, x[peer], peer), (self.group.recv, y[peer], peer)]
        self.go()
        return y

    def broadcast(self, x, root):
        self.group.broadcast(x.data.ptr, x.data.ptr, x.size, self.kind, root, self.stream)
        self.ops.synchronize()

    def reduce(self, x, root):
        self.group.reduce(
            x.data.ptr, x.data.ptr, x.size, self.kind, self.sums["sum"], root, self.stream)
        self.ops.synchronize()

    def barrier(self):
        self.all_reduce(self.ops.zeros((1,), label="buffers"), "sum")

    def send(self, x, peer, tag):
        self.isend(x, peer, tag).Wait()

    def recv(self, x, peer, tag):
        self.irecv(x, peer, tag).Wait()

    def isend(self, x, peer, tag):
        self.posted.append((self.group.send, x, peer))
        return Posted(self)

    def irecv(self, x, peer, tag):
        self.posted.append((self.group.recv, x, peer))
        return Posted(self)

    def close(self):
        self.group.destroy()
        super().close()
