"""Which transport a group gets: by what ranks share, what MPI can do, and what the user asks."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

from mpipar.comm.device import DeviceTransport, StagedTransport
from mpipar.comm.narrow import NarrowTransport
from mpipar.comm.transport import DirectTransport, NoTransport


class Options(NamedTuple):
    """How the wire behaves.

    sync_sends: a send is done only when it is matched.
    check: compare every collective over its group first.
    patient: a rank that waits for a message gives its core away in between.
    uneven: the members hold different stages, so they come to a sum at different times.
    """

    sync_sends: bool = False
    check: bool = False
    patient: bool = False
    uneven: bool = False


def split(mpi_world, ranks: tuple[int, ...]):
    """MPI's communicator of the group `ranks`. Comm: one Split, by every rank of the world."""
    mpi_comm = mpi_world.Split(color=min(ranks), key=ranks.index(mpi_world.rank))
    assert mpi_comm.size == len(ranks), (mpi_comm.size, ranks)
    return mpi_comm


def connect(ops, mpi_world, ranks: tuple[int, ...], options: Options):
    """The transport for one group of world ranks.

    Comm: with an MPI world, one Split over the world. So every rank must connect its groups in the
    same order, even a rank that is alone in its group.
    """
    if mpi_world is None:
        return narrow(NoTransport(ops), ops, len(ranks))
    mpi_comm = split(mpi_world, ranks)
    if ops.device == "cpu":
        kind = DirectTransport
    else:
        kind = DeviceTransport if cuda_aware() == "yes" else StagedTransport
    return narrow(kind(ops, mpi_comm, options), ops, len(ranks))


def narrow(wire, ops, group_size: int):
    """The transport itself, or a wrapper for 16-bit numbers if the ops compute with them."""
    return NarrowTransport(wire, ops, group_size) if ops.dtype.itemsize == 2 else wire


def cuda_aware() -> str:
    """Whether this MPI takes device pointers: yes, no or unknown. Unknown is staged."""
    return gpu_awareness()[0]


def gpu_awareness() -> tuple[str, str]:
    """What this process knows of `stated_awareness`."""
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")  # MPI 4.1
    info.Free()
    try:
        support = int(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        support = None
    return stated_awareness(MPI.Get_library_version(), kinds, os.environ, support)


def stated_awareness(library: str, kinds: str | None, environ, support: int | None,
                     ) -> tuple[str, str]:
    """Whether MPI takes device pointers, yes, no or unknown, and how that is known.

    It is never tried out, because a wrong yes is a segmentation fault. Only a clear statement of
    the library or of the user counts. Anything else is unknown, and is staged through the host.

    kinds: the value of the MPI-4.1 info key mpi_memory_alloc_kinds.
    support: MPIX_Query_cuda_support(), if there is one. Its no is believed of MPICH alone. Open
    MPI's only tells how it was built, and with UCX below it may take device pointers all the same.
    """
    stated = environ.get("MPIPAR_CUDA_AWARE")
    if stated in ("yes", "no"):
        return stated, f"MPIPAR_CUDA_AWARE={stated}"
    if environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":  # Cray MPICH
        return "yes", "MPICH_GPU_SUPPORT_ENABLED=1"
    if kinds is not None:
        return "yes" if "cuda" in kinds else "no", f"mpi_memory_alloc_kinds: {kinds}"
    if support:
        return "yes", "MPIX_Query_cuda_support"
    if support == 0 and library.startswith("MPICH"):
        return "no", "MPIX_Query_cuda_support"
    return "unknown", "buffers will go through host memory"
