"""How bytes travel from device memory: straight into a CUDA-aware MPI, or staged through the host.

mpi4py neither copies nor synchronizes, so the producing CUDA stream is drained before every call,
here and nowhere else.
"""

from __future__ import annotations

from mpipar.comm.transport import Done, HostTransport


class StagedRequest:
    """An MPI request on host memory, and what is left to do when it completes (for receives)."""

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
    """CuPy arrays straight into a CUDA-aware MPI."""

    def all_reduce(self, x, op):
        self.ops.synchronize()
        super().all_reduce(x, op)

    def iall_reduce(self, x):
        # Non-blocking reductions of device memory are not supported by the common MPI libraries.
        self.all_reduce(x, "sum")
        return Done()

    def all_gather(self, x, group_size):
        self.ops.synchronize()
        return super().all_gather(x, group_size)

    def reduce_scatter(self, x):
        self.ops.synchronize()
        return super().reduce_scatter(x)

    def all_to_all(self, x):
        self.ops.synchronize()
        return super().all_to_all(x)

    def broadcast(self, x, root):
        self.ops.synchronize()
        super().broadcast(x, root)

    def reduce(self, x, root):
        self.ops.synchronize()
        super().reduce(x, root)

    def send(self, x, peer, tag):
        self.ops.synchronize()
        super().send(x, peer, tag)

    def recv(self, x, peer, tag):
        self.ops.synchronize()
        super().recv(x, peer, tag)

    def isend(self, x, peer, tag):
        self.ops.synchronize()
        return super().isend(x, peer, tag)

    def irecv(self, x, peer, tag):
        self.ops.synchronize()
        return super().irecv(x, peer, tag)


class StagedTransport(HostTransport):
    """CuPy arrays by way of pinned host memory: device -> host -> MPI -> host -> device."""

    def _to_host(self, x):
        return self.ops.to_pinned(x)  # copies and drains the stream

    def _to_device(self, host, x):
        """Copy host to x and wait: CuPy queues the copy, and memory that is given back too early
        holds the next message before this one has been read.
        """
        x.set(host)
        self.ops.synchronize()

    def _new_on_device(self, host):
        x = self.ops.empty(host.shape, host.dtype, label="buffers")
        self._to_device(host, x)
        return x

    def all_reduce(self, x, op):
        host = self._to_host(x)
        super().all_reduce(host, op)
        self._to_device(host, x)

    def iall_reduce(self, x):
        host = self._to_host(x)
        request = self.mpi.Iallreduce(self.in_place, host)
        return StagedRequest(request, host, lambda: self._to_device(host, x))

    def all_gather(self, x, group_size):
        host = self.ops.pinned((group_size, *x.shape), x.dtype)
        self.mpi.Allgather(self._to_host(x), host)
        return self._new_on_device(host)

    def reduce_scatter(self, x):
        host = self.ops.pinned(x.shape[1:], x.dtype)
        self.mpi.Reduce_scatter_block(self._to_host(x), host)
        return self._new_on_device(host)

    def all_to_all(self, x):
        host = self.ops.pinned(x.shape, x.dtype)
        self.mpi.Alltoall(self._to_host(x), host)
        return self._new_on_device(host)

    def broadcast(self, x, root):
        host = self._to_host(x)
        super().broadcast(host, root)
        self._to_device(host, x)

    def reduce(self, x, root):
        host = self._to_host(x)
        super().reduce(host, root)
        self._to_device(host, x)

    def send(self, x, peer, tag):
        self.isend(x, peer, tag).Wait()

    def recv(self, x, peer, tag):
        self.irecv(x, peer, tag).Wait()

    def isend(self, x, peer, tag):
        host = self._to_host(x)
        return StagedRequest(self._isend(host, peer, tag), host)

    def irecv(self, x, peer, tag):
        host = self.ops.pinned(x.shape, x.dtype)
        request = self.mpi.Irecv(host, peer, tag)
        return StagedRequest(request, host, lambda: self._to_device(host, x))
