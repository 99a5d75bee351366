"""How bytes travel from host memory, or do not travel at all.

Only upper-case mpi4py calls on buffers are used. `mpipar/comm/connect.py` chooses a transport for
each group. Device memory has its own transports (`mpipar/comm/device.py`).
"""

from __future__ import annotations

import time

POLLS_BEFORE_SLEEP = 20  # no sleep for a message that is nearly there
NAP_SECONDS, MOST_NAP_SECONDS = 50e-6, 200e-6  # the first sleep between two polls, and the longest


class Done:
    """The request of an operation that needs no waiting, called like an mpi4py request."""

    def Test(self):
        return True

    def Wait(self):
        pass


class NoTransport:
    """One process and no data: the shapes-only run. Receives leave the array, which has no numbers,
    as it is.
    """

    def __init__(self, ops):
        self.ops = ops

    def all_reduce(self, x, op):
        pass

    def iall_reduce(self, x):
        return Done()

    def ireduce_scatter(self, x):
        return Done()

    def iall_gather(self, x):
        return Done()

    def all_gather(self, x, group_size):
        return self.ops.empty((group_size, *x.shape), x.dtype, label="buffers")

    def reduce_scatter(self, x):
        return self.ops.empty(x.shape[1:], x.dtype, label="buffers")

    def all_to_all(self, x):
        return self.ops.empty(x.shape, x.dtype, label="buffers")

    def broadcast(self, x, root):
        pass

    def reduce(self, x, root):
        pass

    def barrier(self):
        pass

    def send(self, x, peer, tag):
        pass

    def recv(self, x, peer, tag):
        pass

    def isend(self, x, peer, tag):
        return Done()

    def irecv(self, x, peer, tag):
        return Done()

    def max_tag(self):
        return 2**30

    def close(self):
        pass


class PatientRequest:
    """A message that polls with short sleeps, for hosts with more ranks than cores.

    MPI's own wait spins, and takes the core that the awaited rank needs. Measured with 4 ranks on 2
    cores: the default run's step takes 76 ms with sleeps of 50 us and 85 ms with Wait. Polls take
    some of the core too, so the sleeps of a long wait grow. That saves another 3 % of this step,
    and 7 % of that of 1f1b on four stages. Collectives stay with MPI, because their members arrive
    less than one sleep apart. Sums over ranks that hold different stages are the exception.
    """

    def __init__(self, request):
        self.request = request
        self.Test = request.Test

    def Wait(self):
        for _ in range(POLLS_BEFORE_SLEEP):
            if self.request.Test():
                return
        nap = NAP_SECONDS
        while not self.request.Test():
            time.sleep(nap)
            nap = min(2 * nap, MOST_NAP_SECONDS)


class HostTransport:
    """Hands arrays straight to MPI."""

    def __init__(self, ops, mpi_comm, options):
        from mpi4py import MPI

        self.ops = ops
        self.mpi = mpi_comm
        self.in_place = MPI.IN_PLACE
        self.reduce_ops = {"sum": MPI.SUM, "max": MPI.MAX}
        # Synchronous sends return only when matched. A program that works with them never relies on
        # buffers inside MPI, whatever the message size.
        self._send = mpi_comm.Ssend if options.sync_sends else mpi_comm.Send
        self._isend = mpi_comm.Issend if options.sync_sends else mpi_comm.Isend
        self.tag_ub = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # Open MPI sets it there alone
        self.patient = options.patient
        self.sleeps_before_sums = options.patient and options.uneven

    def _new(self, shape, dtype):
        """A new array to receive into."""
        return self.ops.empty(shape, dtype, label="buffers")

    def all_reduce(self, x, op):
        """Sum or maximum, in place. A rank whose stage is done early sleeps until all are here.

        Measured with 4 ranks on 2 cores, without and with that in turns: gpipe's steps take 13 %
        less, and those of 1f1b 5 %.
        """
        if self.sleeps_before_sums:
            PatientRequest(self.mpi.Ibarrier()).Wait()
        self.mpi.Allreduce(self.in_place, x, self.reduce_ops[op])

    def iall_reduce(self, x):
        return self.mpi.Iallreduce(self.in_place, x)

    def ireduce_scatter(self, x):
        return self.mpi.Ireduce_scatter_block(self.in_place, x)

    def iall_gather(self, x):
        return self.mpi.Iallgather(self.in_place, x)

    def all_gather(self, x, group_size):
        y = self._new((group_size, *x.shape), x.dtype)
        self.mpi.Allgather(x, y)
        return y

    def reduce_scatter(self, x):
        y = self._new(x.shape[1:], x.dtype)
        self.mpi.Reduce_scatter_block(x, y)
        return y

    def all_to_all(self, x):
        y = self._new(x.shape, x.dtype)
        self.mpi.Alltoall(x, y)
        return y

    def broadcast(self, x, root):
        self.mpi.Bcast(x, root)  # mpi4py takes 0.2 us longer for a keyword

    def reduce(self, x, root):
        here = self.mpi.rank == root
        self.mpi.Reduce(self.in_place if here else x, x if here else None, root=root)

    def barrier(self):
        self.mpi.Barrier()

    def send(self, x, peer, tag):
        self._send(x, peer, tag)

    def recv(self, x, peer, tag):
        if self.patient:
            self.irecv(x, peer, tag).Wait()
        else:
            self.mpi.Recv(x, peer, tag)

    def isend(self, x, peer, tag):
        return self._patiently(self._isend(x, peer, tag))

    def irecv(self, x, peer, tag):
        return self._patiently(self.mpi.Irecv(x, peer, tag))

    def _patiently(self, request):
        return PatientRequest(request) if self.patient else request

    def max_tag(self):
        return self.tag_ub

    def close(self):
        self.mpi.Free()


class DirectTransport(HostTransport):
    """Hands NumPy arrays straight to MPI. A peer waits for a blocking call: that is MPI's own."""

    def __init__(self, ops, mpi_comm, options):
        super().__init__(ops, mpi_comm, options)
        self.send = self._send
        if not self.patient:
            self.recv = mpi_comm.Recv
