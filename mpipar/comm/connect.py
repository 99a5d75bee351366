"""Chooses a group's transport, by what its ranks share, what MPI can do, and the user's options."""

from __future__ import annotations

import ctypes
import os
import platform
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpipar.comm.algorithms import algorithm_for
from mpipar.comm.algorithms.mpi_library import MpiTransport
from mpipar.comm.device import DeviceTransport, StagedTransport
from mpipar.comm.half_precision import HalfPrecisionTransport
from mpipar.comm.nccl import NcclTransport
from mpipar.comm.objects import all_gather_objects
from mpipar.comm.request import Options
from mpipar.comm.transport import SelfTransport, ShapesTransport, Transport
from mpipar.ops.functions import Ops

if TYPE_CHECKING:
    from mpi4py import MPI


def split(mpi_world: MPI.Comm, ranks: tuple[int, ...]) -> MPI.Comm | None:
    """Return MPI's communicator of the group `ranks`; None for a rank that is alone in it.

    Comm: one Split, by the whole world.
    """
    from mpi4py import MPI

    color = min(ranks) if len(ranks) > 1 else MPI.UNDEFINED
    mpi_comm = mpi_world.Split(color, ranks.index(mpi_world.rank))
    return mpi_comm if len(ranks) > 1 else None


def connect(
    ops: Ops, mpi_world: MPI.Comm | None, ranks: tuple[int, ...], options: Options
) -> Transport:
    """Return the transport for one group of world ranks.

    Comm: with an MPI world, one Split over the world, so every rank must connect its groups in the
    same order, even a rank that is alone in its group. In the group, that of `transport_of`.
    """
    if mpi_world is None:
        return with_half_precision(ShapesTransport(ops), ops, len(ranks), 0)
    mpi_comm = split(mpi_world, ranks)
    if mpi_comm is None:
        return SelfTransport()
    assert mpi_comm.size == len(ranks), (mpi_comm.size, ranks)
    transport = transport_of(ops, mpi_comm, options)
    return with_half_precision(transport, ops, len(ranks), mpi_comm.rank)


def transport_of(ops: Ops, mpi_comm: MPI.Comm, options: Options) -> Transport:
    """Return what carries a group's arrays: MPI, or NCCL if each rank has its own GPU.

    MPIPAR_NCCL=no excludes NCCL. An algorithm other than mpi adds up in host memory.
    Comm: for a GPU, one or two gathers of facts over the group; that of the transport.
    """
    algorithm = algorithm_for(mpi_comm, options.all_reduce)
    if ops.device == "cpu":
        return algorithm(ops, mpi_comm, options)
    if options.all_reduce == "mpi":
        gpu = f"{platform.node()} {ops.xp.cuda.Device().pci_bus_id}"
        alone = len(set(all_gather_objects(mpi_comm, gpu))) == mpi_comm.size > 1
        if alone and all(all_gather_objects(mpi_comm, has_nccl())):
            return NcclTransport(ops, MpiTransport(ops, mpi_comm, options, ops.pinned))
        if cuda_aware() == "yes":
            return DeviceTransport(ops, mpi_comm, options)
    return StagedTransport(ops, algorithm(ops, mpi_comm, options, ops.pinned))


def has_nccl() -> bool:
    """Return whether CuPy has a usable NCCL, which afterwards is loaded as `cupy.cuda.nccl`."""
    if os.environ.get("MPIPAR_NCCL") == "no":
        return False
    with warnings.catch_warnings(action="ignore"):  # without NCCL, MPI is used
        import cupy.cuda.nccl as nccl
    return bool(nccl.available)


def with_half_precision(transport: Transport, ops: Ops, group_size: int, index: int) -> Transport:
    """Return the transport, wrapped for 16-bit numbers if the ops compute with them."""
    if ops.dtype.itemsize > 2:
        return transport
    return HalfPrecisionTransport(transport, ops, group_size, index)


def cuda_aware() -> str:
    """Return whether this MPI accepts device pointers: yes, no or unknown (so staged)."""
    return gpu_awareness()[0]


def gpu_awareness() -> tuple[str, str]:
    """Return `stated_awareness` of this process."""
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")  # MPI 4.1
    info.Free()
    try:
        support = int(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        support = None
    return stated_awareness(MPI.Get_library_version(), kinds, os.environ, support)


def stated_awareness(
    library: str, kinds: str | None, environ: Mapping[str, str], support: int | None
) -> tuple[str, str]:
    """Return whether MPI accepts device pointers (yes, no or unknown), and how that is known.

    It is never tried out, because a wrong yes is a segmentation fault. Only a clear statement of
    the library or of the user counts; anything else is unknown, and staged through the host.

    kinds: the value of the MPI-4.1 info key mpi_memory_alloc_kinds.
    support: MPIX_Query_cuda_support(), if there is one. Its no is trusted only from MPICH: Open
    MPI's only says how it was built, and with UCX below it may accept device pointers all the same.
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
