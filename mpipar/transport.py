"""How bytes travel: host memory, device memory, device memory staged through the host, or not at
all.

Used by `mpipar/comm.py` alone. Upper-case mpi4py buffer calls only: mpi4py neither copies nor
synchronizes, so a device transport drains the producing CUDA stream before every call, here and
nowhere else.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import NamedTuple

import numpy as np

from mpipar.desync import CheckedTransport

POLLS_BEFORE_SLEEP = 20  # a message that is nearly there is not slept over
POLL_SECONDS = 50e-6


class Options(NamedTuple):
    """How the wire behaves: sync_sends: a send is done only when it is matched. check: compare
    every collective over its group first. patient: a rank that waits for a message gives its core
    away in between.
    """

    sync_sends: bool = False
    check: bool = False
    patient: bool = False


def shares_cores(mpi_world) -> bool:
    """Whether some host has more ranks than cores.

    Comm: one split, one all_reduce over the world.
    """
    if mpi_world is None:
        return False
    from mpi4py import MPI

    host = mpi_world.Split_type(MPI.COMM_TYPE_SHARED)
    crowded = np.array([host.size > (os.cpu_count() or 1)], np.int64)
    host.Free()
    mpi_world.Allreduce(MPI.IN_PLACE, crowded, op=MPI.MAX)
    return bool(crowded[0])


def connect(ops, mpi_world, ranks: tuple[int, ...], options: Options, recorder):
    """The transport for one group of world ranks.

    Comm: with an MPI world, one Split over the world; so every rank must connect its groups in the
    same order (a rank that is alone in its group too).
    """
    if mpi_world is None:
        return NoTransport(ops)
    mpi_comm = mpi_world.Split(color=min(ranks), key=mpi_world.rank)
    assert mpi_comm.size == len(ranks), (mpi_comm.size, ranks)
    if ops.device == "cpu":
        kind = HostTransport
    else:
        kind = DeviceTransport if cuda_aware() == "yes" else StagedTransport
    wire = kind(ops, mpi_comm, options)
    return CheckedTransport(wire, mpi_comm, ranks, recorder) if options.check else wire


def cuda_aware() -> str:
    """Whether this MPI takes device pointers: yes, no or unknown, asked without risking a crash.

    A wrong yes is a segmentation fault, so anything but a clear statement of the library or of the
    user's environment (MPIPAR_CUDA_AWARE=yes|no) is unknown, and unknown is staged through the
    host.
    """
    stated = os.environ.get("MPIPAR_CUDA_AWARE")
    if stated in ("yes", "no"):
        return stated
    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":  # Cray MPICH
        return "yes"
    from mpi4py import MPI

    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds")  # MPI 4.1
    if kinds is not None:
        return "yes" if "cuda" in kinds else "no"
    try:
        return "yes" if ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support() else "no"
    except (OSError, AttributeError):
        return "unknown"


class Done:
    """The request of an operation that needs no waiting, called like an mpi4py request."""

    def Test(self):
        return True

    def Wait(self):
        pass


class NoTransport:
    """One process, no data: the shapes-only run. Receives leave the (numberless) array as it is."""

    def __init__(self, ops):
        self.ops = ops

    def all_reduce(self, x, op):
        pass

    def iall_reduce(self, x):
        return Done()

    def all_gather(self, x, group_size):
        return self.ops.empty((group_size, *x.shape), x.dtype, label="buffers")

    def reduce_scatter(self, x):
        return self.ops.empty(x.shape[1:], x.dtype, label="buffers")

    def all_to_all(self, x):
        return self.ops.empty(x.shape, x.dtype, label="buffers")

    def broadcast(self, x, root):
        pass

    def barrier(self):
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
    """A receive that polls with short sleeps, for hosts with more ranks than cores.

    MPI's own wait spins, and the core that it takes is the one that the awaited rank needs.
    Measured with 4 ranks on 2 cores: the default run's step takes 76 ms this way and 85 ms with
    Wait. Collectives stay with MPI: their members arrive within a shorter time of each other than a
    sleep takes.
    """

    def __init__(self, request):
        self.request = request
        self.Test = request.Test

    def Wait(self):
        for _ in range(POLLS_BEFORE_SLEEP):
            if self.request.Test():
                return
        while not self.request.Test():
            time.sleep(POLL_SECONDS)


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


class HostTransport:
    """NumPy arrays straight into MPI."""

    def __init__(self, ops, mpi_comm, options):
        from mpi4py import MPI

        self.ops = ops
        self.mpi = mpi_comm
        self.in_place = MPI.IN_PLACE
        self.reduce_ops = {"sum": MPI.SUM, "max": MPI.MAX}
        # Synchronous sends return only when matched: a program that works with them never leans on
        # buffering inside MPI, whatever the message size.
        self._isend = mpi_comm.Issend if options.sync_sends else mpi_comm.Isend
        self.tag_ub = mpi_comm.Get_attr(MPI.TAG_UB)
        self.patient = options.patient

    def all_reduce(self, x, op):
        self.mpi.Allreduce(self.in_place, x, op=self.reduce_ops[op])

    def iall_reduce(self, x):
        return self.mpi.Iallreduce(self.in_place, x)

    def all_gather(self, x, group_size):
        y = self.ops.empty((group_size, *x.shape), x.dtype, label="buffers")
        self.mpi.Allgather(x, y)
        return y

    def reduce_scatter(self, x):
        y = self.ops.empty(x.shape[1:], x.dtype, label="buffers")
        self.mpi.Reduce_scatter_block(x, y)
        return y

    def all_to_all(self, x):
        y = self.ops.empty(x.shape, x.dtype, label="buffers")
        self.mpi.Alltoall(x, y)
        return y

    def broadcast(self, x, root):
        self.mpi.Bcast(x, root=root)

    def barrier(self):
        self.mpi.Barrier()

    def isend(self, x, peer, tag):
        return self._isend(x, peer, tag)

    def irecv(self, x, peer, tag):
        request = self.mpi.Irecv(x, peer, tag)
        return PatientRequest(request) if self.patient else request

    def max_tag(self):
        return self.tag_ub

    def close(self):
        self.mpi.Free()


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

    def all_reduce(self, x, op):
        host = self._to_host(x)
        super().all_reduce(host, op)
        x.set(host)

    def iall_reduce(self, x):
        host = self._to_host(x)
        request = self.mpi.Iallreduce(self.in_place, host)
        return StagedRequest(request, host, lambda: x.set(host))

    def all_gather(self, x, group_size):
        host = self.ops.pinned((group_size, *x.shape), x.dtype)
        self.mpi.Allgather(self._to_host(x), host)
        return self.ops.asarray(host)

    def reduce_scatter(self, x):
        host = self.ops.pinned(x.shape[1:], x.dtype)
        self.mpi.Reduce_scatter_block(self._to_host(x), host)
        return self.ops.asarray(host)

    def all_to_all(self, x):
        host = self.ops.pinned(x.shape, x.dtype)
        self.mpi.Alltoall(self._to_host(x), host)
        return self.ops.asarray(host)

    def broadcast(self, x, root):
        host = self._to_host(x)
        super().broadcast(host, root)
        x.set(host)

    def isend(self, x, peer, tag):
        host = self._to_host(x)
        return StagedRequest(self._isend(host, peer, tag), host)

    def irecv(self, x, peer, tag):
        host = self.ops.pinned(x.shape, x.dtype)
        return StagedRequest(self.mpi.Irecv(host, peer, tag), host, lambda: x.set(host))
