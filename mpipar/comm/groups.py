"""All groups of a rank: which ones exist, and the transport of each."""

from __future__ import annotations

import ctypes
import os
import platform
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mpipar.comm.algorithms import algorithm_for
from mpipar.comm.collective_check import CollectiveCheck
from mpipar.comm.device import DeviceTransport, StagedTransport
from mpipar.comm.grid import Grid
from mpipar.comm.group import Comm
from mpipar.comm.half_precision import HalfPrecisionTransport
from mpipar.comm.hosts import shares_cores, use_batch_scheduling
from mpipar.comm.launcher import check_world
from mpipar.comm.mpi import MpiTransport
from mpipar.comm.nccl import NcclTransport
from mpipar.comm.objects import all_gather_objects
from mpipar.comm.recorder import Recorder
from mpipar.comm.transport import Options, SelfTransport, ShapesTransport, Transport
from mpipar.ops.functions import Ops

if TYPE_CHECKING:
    from mpi4py import MPI

    World: TypeAlias = MPI.Comm


FEW = ("world", "inner")  # groups that sum only a few numbers
Partitions: TypeAlias = Mapping[str, Sequence[tuple[int, ...]]]


class Comms(dict[str, Comm]):
    """All groups of one rank: `world`, one per axis, derived groups, and further ones by name.

    comms["tp"] is this rank's group of that name. groups: {name: Comm} of those that exist: where
    data is the same as dp, there is only dp, under both names. `alone` is the group of this rank
    only. `partitions` maps a name (e.g. "tie") to the world ranks of *every* such group.
    All ranks take part in making them; a rank that is in none of them is alone. messages: names of
    the groups in which neighbours exchange messages in each step.
    Comm: one communicator split per group when `mpi_world` is given; none for the shapes-only run.
    """

    def __init__(
        self,
        grid: Grid,
        ops: Ops,
        recorder: Recorder,
        mpi_world: MPI.Comm | None = None,
        options: Options | None = None,
        partitions: Partitions | None = None,
        messages: Collection[str] = (),
    ):
        if mpi_world is not None:
            check_world(mpi_world, os.environ)
        self.grid, self.recorder, self.mpi_world, self.ops = grid, recorder, mpi_world, ops
        oversubscribed = shares_cores(mpi_world)
        options = (options or Options())._replace(yields_cpu=oversubscribed)
        if oversubscribed:
            use_batch_scheduling()

        def make(axis: str, ranks: tuple[int, ...], alone: bool = False) -> Comm:
            """Return this rank's Comm. alone: all groups on this axis have only one rank."""
            if alone:
                return Comm(axis, ranks, 0, None, recorder)
            stages = {grid.group_rank_of(member, "pp") for member in ranks}
            own = options._replace(
                uneven=len(stages) > 1,
                reach=max(options.reach, axis in messages),
                all_reduce="mpi" if axis in FEW else options.all_reduce,
            )
            transport, check = connect(ops, mpi_world, ranks, own), None
            if options.check and mpi_world is not None:
                mpi_comm = split(mpi_world, ranks)
                check = CollectiveCheck(mpi_comm, ranks) if mpi_comm is not None else None
            return Comm(axis, ranks, ranks.index(grid.world_rank), transport, recorder, check)

        self.alone = Comm("alone", (grid.world_rank,), 0, None, recorder)
        world = tuple(range(grid.world_size))
        self.world = make("world", world, grid.world_size == 1)
        self.groups = {}
        for name in grid.groups():
            self.groups[name] = make(name, grid.group(name), grid.size(name) == 1)
        for name, groups in (partitions or {}).items():
            mine = next((ranks for ranks in groups if grid.world_rank in ranks), (grid.world_rank,))
            self.groups[name] = make(name, mine, all(len(ranks) == 1 for ranks in groups))
        self.groups["world"] = self.world
        self.mpi_inner = mpi_world  # of the group inner, for facts without a record
        if mpi_world is not None and grid.alias_of("inner") == "inner":
            self.mpi_inner = split(mpi_world, grid.group("inner"))
        super().__init__(
            self.groups | {name: self.groups[grid.alias_of(name)] for name in grid.parts}
        )

    @property
    def carriers(self) -> list[str]:
        """What carries the bytes of this rank's groups between GPUs, as text."""
        return sorted(
            {
                comm.transport.carrier
                for comm in self.groups.values()
                if comm.size > 1 and comm.transport.ops.device == "cuda"
            }
        )

    @classmethod
    def solo(cls, ops: Ops, grid: Grid | None = None, recorder: Recorder | None = None) -> Comms:
        """Return the groups of one rank of `grid` (default: a single rank), without MPI."""
        return cls(grid or Grid(0), ops, recorder or Recorder())

    def close(self) -> None:
        """Free the communicators, because MPI has only about two thousand.

        Comm: every rank, in the same order.
        """
        for comm in self.groups.values():
            comm.close()


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


def with_half_precision(
    transport: Transport, ops: Ops, group_size: int, group_rank: int
) -> Transport:
    """Return the transport, wrapped for 16-bit numbers if the ops compute with them."""
    if ops.dtype.itemsize > 2:
        return transport
    return HalfPrecisionTransport(transport, ops, group_size, group_rank)


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
