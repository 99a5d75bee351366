"""How bytes travel from device memory: straight into a CUDA-aware MPI, or staged through the host.

mpi4py neither copies nor synchronizes. Before an array comes here, Comm has drained the stream that
made it. A transport drains the stream itself after what it computes itself.

What is only posted does not stop the device. Its copies run on streams of their own
(`mpipar/ops/cupy_copies.py`) while products go on. MPI is called behind the copy to the host, once
a test sees that it is done. A wait or a blocking call first waits for all such copies.
"""

from __future__ import annotations

from mpipar.comm.transport import Done, HostTransport


class Leaving:
    """A request for x, which is first copied to `host`: post(host) then makes the MPI call.

    host: see `Copies.out`.
    """

    def __init__(self, copies, x, post, host=None):
        self.copies, self.post, self.request = copies, post, None
        self.host = copies.out(x, self._post, host)

    def _post(self, host):
        self.request = self.post(host)

    def Test(self):
        self.copies.hand_over()
        return self.request is not None and self.request.Test()

    def Wait(self):
        self.copies.hand_over(wait=True)
        self.request.Wait()


class Arriving:
    """A request whose numbers come into `host`, from where they are copied to x.

    `Test` is true when the copy is done. `Wait` ends when it is queued: what this rank computes
    afterwards waits for it on the device, and the next message travels meanwhile.
    """

    def __init__(self, copies, request, host, x):
        self.copies, self.request, self.host, self.x = copies, request, host, x
        self.copied = None  # the event of the copy, once it is queued

    def Test(self):
        self.copies.hand_over()
        if self.copied is None and self.request.Test():
            self.copied = self.copies.into(self.host, self.x)
        return self.copied is not None and self.copied.done

    def Wait(self):
        if self.copied is None:
            self.copies.hand_over(wait=True)
            self.request.Wait()
            self.copied = self.copies.into(self.host, self.x)
        self.copies.use_after(self.copied)


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
    """Sends CuPy arrays through pinned host memory: device -> host -> MPI -> host -> device.

    A blocking call ends when its result is on the device, so its record has the time of both
    copies.
    """

    def __init__(self, ops, mpi_comm, options):
        super().__init__(ops, mpi_comm, options)
        self.copies = ops.copies
        self.checked = options.check

    def _to_host(self, x):
        """Return x in host memory, for a call that blocks in MPI: nothing else of this rank waits
        for its own copy then.
        """
        self.copies.hand_over(wait=True)
        return self.ops.to_pinned(x)

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
        host = self._to_host(x)
        call(host, argument)
        self._to_device(host, x)

    def _leave(self, x, post, host=None):
        leaving = Leaving(self.copies, x, post, host)
        if self.checked:  # --check-comm blocks in MPI before each collective
            self.copies.hand_over(wait=True)
        return leaving

    def all_reduce(self, x, op):
        self._in_place(super().all_reduce, x, op)

    def broadcast(self, x, root):
        self._in_place(super().broadcast, x, root)

    def reduce(self, x, root):
        self._in_place(super().reduce, x, root)

    def iall_reduce(self, x):
        leaving = self._leave(x, super().iall_reduce)
        return Arriving(self.copies, leaving, leaving.host, x)

    def ireduce_scatter(self, x):
        leaving = self._leave(x, super().ireduce_scatter)
        return Arriving(self.copies, leaving, leaving.host[0], x[0])

    def iall_gather(self, x):
        host, post = self.copies.room(x.shape, x.dtype), super().iall_gather
        own = slice(self.mpi.rank, self.mpi.rank + 1)  # MPI reads no other part
        leaving = self._leave(x[own], lambda _: post(host), host[own])
        return Arriving(self.copies, leaving, host, x)

    def all_gather(self, x, group_size):
        return self._new_on_device(super().all_gather(self._to_host(x), group_size))

    def reduce_scatter(self, x):
        return self._new_on_device(super().reduce_scatter(self._to_host(x)))

    def all_to_all(self, x):
        return self._new_on_device(super().all_to_all(self._to_host(x)))

    def barrier(self):
        self.copies.hand_over(wait=True)
        super().barrier()

    def send(self, x, peer, tag):
        self.isend(x, peer, tag).Wait()

    def recv(self, x, peer, tag):
        self.irecv(x, peer, tag).Wait()
        self.ops.synchronize()

    def isend(self, x, peer, tag):
        post = super().isend
        return self._leave(x, lambda host: post(host, peer, tag))

    def irecv(self, x, peer, tag):
        host = self.copies.room(x.shape, x.dtype)
        return Arriving(self.copies, super().irecv(host, peer, tag), host, x)
