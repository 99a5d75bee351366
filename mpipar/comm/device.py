"""Transports for device memory: straight into a CUDA-aware MPI, or staged through the host.

mpi4py neither copies nor synchronizes. Before an array gets here, Comm has drained the stream that
produced it. After its own computations a transport drains the stream itself.

Posted operations do not stop the device. Their copies run on streams of their own
(`mpipar/ops/cupy_copies.py`) while products continue. MPI is called after the copy to the host,
once a test sees that it is done. A wait or a blocking call first waits for all such copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from mpipar.comm.mpi import MpiTransport
from mpipar.comm.transport import Counts, Done, Exchanged, Request
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, DeviceArray

if TYPE_CHECKING:
    from mpipar.ops.cupy_copies import Copies

A = TypeVar("A")


class DeviceToHostSend:
    """A request for x, which is first copied to `host`; post(host) then makes the MPI call.

    host: see `Copies.out`.
    """

    def __init__(
        self, copies: Copies, x: Array, post: Callable[[Array], Request], host: Array | None = None
    ):
        self.copies, self.post = copies, post
        self.request: Request | None = None
        self.host = copies.out(x, self._post, host)

    def _post(self, host: Array) -> None:
        self.request = self.post(host)

    def Test(self) -> bool:
        self.copies.hand_over()
        return self.request is not None and self.request.Test()

    def Wait(self) -> None:
        self.copies.hand_over(wait=True)
        assert self.request is not None
        self.request.Wait()


class HostToDeviceReceive:
    """A request whose numbers arrive in `host`, from which they are copied to x.

    `Test` is true once the copy is done. `Wait` ends when it is queued: what this rank computes
    afterwards waits for it on the device, and the next message travels meanwhile.
    """

    def __init__(self, copies: Copies, request: Request, host: Array, x: Array):
        self.copies, self.request, self.host, self.x = copies, request, host, x
        self.copied: Any = None  # the event of the copy, once it is queued

    def Test(self) -> bool:
        self.copies.hand_over()
        if self.copied is None and self.request.Test():
            self.copied = self.copies.into(self.host, self.x)
        return self.copied is not None and bool(self.copied.done)

    def Wait(self) -> None:
        if self.copied is None:
            self.copies.hand_over(wait=True)
            self.request.Wait()
            self.copied = self.copies.into(self.host, self.x)
        self.copies.use_after(self.copied)


class DeviceTransport(MpiTransport):
    """Hands CuPy arrays straight to a CUDA-aware MPI."""

    carrier = "MPI from device memory"

    def iall_reduce(self, x: Array) -> Request:
        # The common MPI libraries do not support non-blocking reductions of device memory.
        self.all_reduce(x, "sum")
        return Done()

    def ireduce_scatter(self, x: Array) -> Request:
        super().ireduce_scatter(x).Wait()
        return Done()


class StagedTransport:
    """Sends CuPy arrays through pinned host memory: device -> host -> MPI -> host -> device.

    host: the transport of the copies in host memory, by any algorithm. A blocking call ends when
    its result is on the device, so its record includes both copies.
    """

    carrier, in_order = "MPI through host memory", False

    def __init__(self, ops: Ops, host: MpiTransport):
        self.ops, self.host, self.copies = ops, host, ops.copies
        self.zeros, self.max_tag = ops.zeros, host.max_tag

    def close(self) -> None:
        self.host.close()

    def _to_host(self, x: DeviceArray) -> Array:
        """Return x in host memory, for a call that blocks in MPI.

        All pending copies are finished first, because nothing here could finish them meanwhile.
        """
        self.copies.hand_over(wait=True)
        host = self.ops.pinned(x.shape, x.dtype)
        x.get(out=host)
        return host

    def _to_device(self, host: Array, x: DeviceArray) -> None:
        """Copy host to x and wait.

        CuPy only queues the copy. Host memory that is released before the copy runs could already
        hold the next message.
        """
        x.set(host)
        self.ops.synchronize()

    def _new_on_device(self, host: Array) -> Array:
        x = self.ops.empty(host.shape, host.dtype, label="buffers")
        self._to_device(host, x)
        return x

    def _in_place(self, call: Callable[[Array, A], None], x: Array, argument: A) -> None:
        """Make a call that changes x, on a copy of x in host memory."""
        host = self._to_host(x)
        call(host, argument)
        self._to_device(host, x)

    def _leave(
        self, x: Array, post: Callable[[Array], Request], host: Array | None = None
    ) -> DeviceToHostSend:
        leaving = DeviceToHostSend(self.copies, x, post, host)
        if self.host.options.check:  # --check-comm blocks in MPI before each collective
            self.copies.hand_over(wait=True)
        return leaving

    def all_reduce(self, x: Array, op: str) -> None:
        self._in_place(self.host.all_reduce, x, op)

    def broadcast(self, x: Array, root: int) -> None:
        self._in_place(self.host.broadcast, x, root)

    def reduce(self, x: Array, root: int) -> None:
        self._in_place(self.host.reduce, x, root)

    def iall_reduce(self, x: Array) -> Request:
        leaving = self._leave(x, self.host.iall_reduce)
        return HostToDeviceReceive(self.copies, leaving, leaving.host, x)

    def ireduce_scatter(self, x: Array) -> Request:
        leaving = self._leave(x, self.host.ireduce_scatter)
        return HostToDeviceReceive(self.copies, leaving, leaving.host[0], x[0])

    def iall_gather(self, x: Array) -> Request:
        host, index = self.copies.room(x.shape, x.dtype), self.host.mpi.rank
        own = slice(index, index + 1)  # MPI reads no other part
        leaving = self._leave(x[own], lambda _: self.host.iall_gather(host), host[own])
        return HostToDeviceReceive(self.copies, leaving, host, x)

    def all_gather(self, x: Array, group_size: int) -> Array:
        return self._new_on_device(self.host.all_gather(self._to_host(x), group_size))

    def reduce_scatter(self, x: Array) -> Array:
        return self._new_on_device(self.host.reduce_scatter(self._to_host(x)))

    def all_to_all(self, x: Array) -> Array:
        return self._new_on_device(self.host.all_to_all(self._to_host(x)))

    def all_to_allv(self, x: Array, counts: Counts, received: Counts | None) -> Exchanged:
        host, received = self.host.all_to_allv(self._to_host(x), counts, received)
        return self._new_on_device(host), received

    def barrier(self) -> None:
        self.copies.hand_over(wait=True)
        self.host.barrier()

    def isend(self, x: Array, peer: int, tag: int) -> Request:
        return self._leave(x, lambda host: self.host.isend(host, peer, tag))

    def irecv(self, x: Array, peer: int, tag: int) -> Request:
        host = self.copies.room(x.shape, x.dtype)
        return HostToDeviceReceive(self.copies, self.host.irecv(host, peer, tag), host, x)
