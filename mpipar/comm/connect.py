"""Which transport a group gets: by what ranks share, what MPI can do, what the user asked."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

import numpy as np

from mpipar.comm.device import DeviceTransport, StagedTransport
from mpipar.comm.narrow import NarrowTransport
from mpipar.comm.transport import HostTransport, NoTransport


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


def split(mpi_world, ranks: tuple[int, ...]):
    """MPI's communicator of the group `ranks`. Comm: one Split; every rank of the world."""
    mpi_comm = mpi_world.Split(color=min(ranks), key=ranks.index(mpi_world.rank))
    assert mpi_comm.size == len(ranks), (mpi_comm.size, ranks)
    return mpi_comm


def connect(ops, mpi_world, ranks: tuple[int, ...], options: Options):
    """The transport for one group of world ranks.

    Comm: with an MPI world, one Split over the world; so every rank must connect its groups in the
    same order (a rank that is alone in its group too).
    """
    if mpi_world is None:
        return narrow(NoTransport(ops), ops, len(ranks))
    mpi_comm = split(mpi_world, ranks)
    if ops.device == "cpu":
        kind = HostTransport
    else:
        kind = DeviceTransport if cuda_aware() == "yes" else StagedTransport
    return narrow(kind(ops, mpi_comm, options), ops, len(ranks))


def narrow(wire, ops, group_size: int):
    """The transport itself, or what makes it fit for 16-bit numbers where the ops have such."""
    return NarrowTransport(wire, ops, group_size) if ops.dtype.itemsize == 2 else wire


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
