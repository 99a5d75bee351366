"""How bytes travel from device memory: straight into a CUDA-aware MPI, or staged through the host.

mpi4py neither copies nor synchronizes. Before an array comes here, Comm has drained the stream that
made it. A transport drains the stream itself after what it computes itself.
"""

from __future__ import annotations

from mpipar.comm.transport import Done, HostTransport


class StagedRequest:
    """An MPI request on host memory, and what to do when it completes (for receives)."""

    def __init__(self, request, keep, finish=None):
        self.request = request
        self.keep = keep  # a buffer that must live as long as the request
        self.finish = finish

    def Test(self):
        if not self.request.Test():
            return False
        self._finish()
        return True

    def Wait(self):
        self.request.Wait()
        self._finish()

    def _finish(self):
        if self.finish is not None:
            self.finish()
        self.keep = self.finish = None


class DeviceTransport(HostTransport):
    """Hands CuPy arrays straight to a CUDA-aware MPI."""

    def iall_reduce(self, x):
        # The common MPI libraries do not support non-blocking reductions of device memory.
        self.all_reduce(x, "sum")
        return Done()

    def ireduce_scatter(self, x):
        self.mpi.Reduce_scatter_block(self.in_place, x)
        return Done()


class StagedTransport(HostTransport):
    """Sends CuPy arrays through pinned host memory: device -> host -> MPI -> host -> device."""

    def _to_device(self, host, x):
        """Copy host to x and wait.

        CuPy only queues the copy. Host memory given back before it runs would already hold the next
        message.
        """
        x.set(host)
        self.ops.synchronize()

    def _new_on_device(self, host):
        x = self.ops.empty(host.shape, host.dtype, label="buffers")
        self._to_device(host, x)
        return x

    def _new(self, shape, dtype):
        return self.ops.pinned(shape, dtype)

    def _in_place(self, call, x, argument):
        """Make a call that changes x, on a copy of x in host memory."""
        host = self.ops.to_pinned(x)
        call(host, argument)
        self._to_device(host, x)

    def all_reduce(self, x, op):
        self._in_place(super().all_reduce, x, op)

    def broadcast(self, x, root):
        self._in_place(super().broadcast, x, root)

    def reduce(self, x, root):
        self._in_place(super().reduce, x, root)

    def iall_reduce(self, x):
        host = self.ops.to_pinned(x)
        return StagedRequest(super().iall_reduce(host), host, lambda: self._to_device(host, x))

    def ireduce_scatter(self, x):
        host = self.ops.to_pinned(x)
        return StagedRequest(super().ireduce_scatter(host), host,
                             lambda: self._to_device(host[0], x[0]))

    def iall_gather(self, x):
        host = self.ops.to_pinned(x)
        return StagedRequest(super().iall_gather(host), host, lambda: self._to_device(host, x))

    def all_gather(self, x, group_size):
        return self._new_on_device(super().all_gather(self.ops.to_pinned(x), group_size))

    def reduce_scatter(self, x):
        return self._new_on_device(super().reduce_scatter(self.ops.to_pinned(x)))

    def all_to_all(self, x):
        return self._new_on_device(super().all_to_all(self.ops.to_pinned(x)))

    def send(self, x, peer, tag):
        self.isend(x, peer, tag).Wait()

    def recv(self, x, peer, tag):
        self.irecv(x, peer, tag).Wait()

    def isend(self, x, peer, tag):
        host = self.ops.to_pinned(x)
        return StagedRequest(super().isend(host, peer, tag), host)

    def irecv(self, x, peer, tag):
        host = self.ops.pinned(x.shape, x.dtype)
        request = super().irecv(host, peer, tag)
        return StagedRequest(request, host, lambda: self._to_device(host, x))
