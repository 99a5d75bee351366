"""Transport from GPU to GPU through NCCL, without the host.

NCCL has neither tags nor requests. A call waits on a stream for all earlier calls there, and then
for the same call of its peers. Two orders keep ranks from waiting for each other in a circle.

The collectives of a group run on one stream, and every member makes them in the same order.

Messages run in lanes. A lane leads from one rank to another, and carries tags of one parity: those
of activations are even, those of gradients odd. It has a communicator and a stream of its own, so
it waits for no other lane. Both ends post the messages of a lane in the same order (see
`pipeline.check.check_lanes`), so the n-th send meets the n-th receive once both are posted. A
synchronous send of MPI waits for the same, so what cannot hang there cannot hang here. Ranks that
are too far apart for a lane send through the host.

No rank waits inside NCCL, except while communicators are made and freed. A wait polls an event of
the stream and checks for errors; to the watchdog it looks like a wait in MPI. A rank that fails
ends the job by MPI_Abort, and what its peers wait for on their GPUs ends with their processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpipar.comm.device import StagedTransport
from mpipar.comm.grid import consecutive_slices
from mpipar.comm.mpi import MpiTransport
from mpipar.comm.transport import Counts, Exchanged, Request
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, DeviceArray, Shape

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike

KEY_BYTES = 128  # of NCCL's unique id, which is of type bytes since CuPy 14
PARITIES = (0, 1)  # of tags


class Queued:
    """The latest call of a communicator on its stream; it is done when this event is."""

    def __init__(self, group: Any, stream: Any):
        self.group, self.event = group, stream.record()

    def Test(self) -> bool:
        self.group.check_async_error()  # a peer may be gone
        return bool(self.event.done)

    def Wait(self) -> None:
        while not self.Test():
            pass


class Lane:
    """One end of a lane; sends: whether it is the sending end. Comm: to create it, by both ends."""

    def __init__(self, ops: Ops, mpi_comm: MPI.Comm, peer: int, sends: bool):
        self.nccl, key = ops.xp.cuda.nccl, bytearray(KEY_BYTES)
        if sends:
            key[:] = self.nccl.get_unique_id()
            mpi_comm.Send(key, peer)
        else:
            mpi_comm.Recv(key, peer)
        self.group = self.nccl.NcclCommunicator(2, bytes(key), 0 if sends else 1)
        self.stream = ops.xp.cuda.Stream(non_blocking=True)
        self.sends = sends

    def post(self, x: Array) -> Queued:
        """Queue a message after those before it."""
        if self.sends:
            self.group.send(address(x), x.nbytes, self.nccl.NCCL_INT8, 1, self.stream.ptr)
        else:
            self.group.recv(address(x), x.nbytes, self.nccl.NCCL_INT8, 0, self.stream.ptr)
        return Queued(self.group, self.stream)


class NcclTransport(StagedTransport):
    """Hands CuPy arrays to CuPy's NCCL. A blocking call ends when its result can be used.

    Data that only moves is sent as bytes.
    """

    carrier, in_order = "NCCL", True

    def __init__(self, ops: Ops, host: MpiTransport):
        super().__init__(ops, host)
        mpi_comm = host.mpi
        self.group_rank = mpi_comm.rank
        self.nccl, key = ops.xp.cuda.nccl, bytearray(KEY_BYTES)
        if mpi_comm.rank == 0:
            key[:] = self.nccl.get_unique_id()
        mpi_comm.Bcast(key)
        self.group = self.nccl.NcclCommunicator(mpi_comm.size, bytes(key), mpi_comm.rank)
        self.stream = ops.xp.cuda.Stream(non_blocking=True)
        self.byte = self.nccl.NCCL_INT8
        self.kinds = {
            "float32": self.nccl.NCCL_FLOAT32,
            "float64": self.nccl.NCCL_FLOAT64,
            "int64": self.nccl.NCCL_INT64,
            "uint64": self.nccl.NCCL_UINT64,
        }
        self.sums = {"sum": self.nccl.NCCL_SUM, "max": self.nccl.NCCL_MAX}
        self.lanes: dict[tuple[int, bool, int], Lane] = {}  # by peer, whether it sends, parity
        for source, target in pairs(mpi_comm.size, host.options.reach):
            for here, peer in ((source, target), (target, source)):
                if here == mpi_comm.rank:
                    for parity in PARITIES:
                        sends = here == source
                        self.lanes[peer, sends, parity] = Lane(ops, mpi_comm, peer, sends)

    def _new(self, shape: Shape, dtype: DTypeLike) -> Array:
        return self.ops.empty(shape, dtype, label="buffers")

    def _queued(self) -> Request:
        return self.host.polled(Queued(self.group, self.stream))

    def _reduced(self, x: Array, op: str) -> Request:
        self.group.allReduce(
            address(x), address(x), x.size, self.kinds[x.dtype.name], self.sums[op], self.stream.ptr
        )
        return self._queued()

    def all_reduce(self, x: Array, op: str) -> None:
        self._reduced(x, op).Wait()

    def iall_reduce(self, x: Array) -> Request:
        return self._reduced(x, "sum")

    def _scattered(self, x: Array, y: Array) -> None:
        self.group.reduceScatter(
            address(x),
            address(y),
            y.size,
            self.kinds[x.dtype.name],
            self.sums["sum"],
            self.stream.ptr,
        )

    def reduce_scatter(self, x: Array) -> Array:
        y = self._new(x.shape[1:], x.dtype)
        self._scattered(x, y)
        self._queued().Wait()
        return y

    def ireduce_scatter(self, x: Array) -> Request:
        own = x[self.group_rank]  # NCCL allows no other place inside of x
        self._scattered(x, own)
        if self.group_rank > 0:
            x[0].data.copy_from_device_async(own.data, own.nbytes, self.stream)
        return self._queued()

    def _gathered(self, x: Array, y: Array) -> Request:
        self.group.allGather(address(x), address(y), x.nbytes, self.byte, self.stream.ptr)
        return self._queued()

    def all_gather(self, x: Array, group_size: int) -> Array:
        y = self._new((group_size, *x.shape), x.dtype)
        self._gathered(x, y).Wait()
        return y

    def iall_gather(self, x: Array) -> Request:
        return self._gathered(x[self.group_rank], x)

    def _exchanged(self, sent: list[Array], received: list[Array]) -> None:
        """Exchange a part with each rank, in one group of calls, so that none waits for another."""
        self.nccl.groupStart()
        for peer, (there, here) in enumerate(zip(sent, received, strict=True)):
            if there.size:
                self.group.send(address(there), there.nbytes, self.byte, peer, self.stream.ptr)
            if here.size:
                self.group.recv(address(here), here.nbytes, self.byte, peer, self.stream.ptr)
        self.nccl.groupEnd()
        self._queued().Wait()

    def all_to_all(self, x: Array) -> Array:
        y = self._new(x.shape, x.dtype)
        self._exchanged(list(x), list(y))
        return y

    def all_to_allv(self, x: Array, counts: Counts, received: Counts | None) -> Exchanged:
        received = self.host.counts_from(counts) if received is None else received
        y = self._new((sum(received), *x.shape[1:]), x.dtype)
        self._exchanged(
            [x[run] for run in consecutive_slices(counts)],
            [y[run] for run in consecutive_slices(received)],
        )
        return y, received

    def broadcast(self, x: Array, root: int) -> None:
        self.group.broadcast(address(x), address(x), x.nbytes, self.byte, root, self.stream.ptr)
        self._queued().Wait()

    def reduce(self, x: Array, root: int) -> None:
        self.group.reduce(
            address(x),
            address(x),
            x.size,
            self.kinds[x.dtype.name],
            self.sums["sum"],
            root,
            self.stream.ptr,
        )
        self._queued().Wait()

    def isend(self, x: Array, peer: int, tag: int) -> Request:
        lane = self.lanes.get((peer, True, tag % 2))
        return self.host.polled(lane.post(x)) if lane else super().isend(x, peer, tag)

    def irecv(self, x: Array, peer: int, tag: int) -> Request:
        lane = self.lanes.get((peer, False, tag % 2))
        return self.host.polled(lane.post(x)) if lane else super().irecv(x, peer, tag)

    def close(self) -> None:
        for group in (*(lane.group for lane in self.lanes.values()), self.group):
            group.destroy()
        super().close()


def address(x: DeviceArray) -> int:
    """Return the address at which an array begins; it must be contiguous."""
    assert x.flags.c_contiguous, (x.shape, x.strides)
    start: int = x.data.ptr
    return start


def pairs(size: int, reach: int) -> Iterator[tuple[int, int]]:
    """Yield (source, target) of the group ranks that are at most `reach` apart around its ring.

    The order is the same for all ranks, so none waits for another in a circle. Pairs that begin at
    even ranks come first, so that a long ring is connected in few rounds.
    """
    for first in (*range(0, size, 2), *range(1, size, 2)):
        for target in range(size):
            apart = (target - first) % size
            if target != first and min(apart, size - apart) <= reach:
                yield first, target
