"""Groups of ranks for a benchmark: their communicators, who runs together, who waits.

A group that is measured alone must not be disturbed, so the others wait with long sleeps.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from mpipar.comm.algorithms.mpi_library import MpiTransport
from mpipar.comm.connect import has_nccl, with_half_precision
from mpipar.comm.device import DeviceTransport, StagedTransport
from mpipar.comm.grid import Grid
from mpipar.comm.group import Comm
from mpipar.comm.groups import Comms
from mpipar.comm.nccl import NcclTransport
from mpipar.comm.request import Options
from mpipar.errors import EnvironmentProblem

POLL_SECONDS = 0.5e-3
WIRES = {
    "mpi-host": MpiTransport,
    "mpi-cuda": DeviceTransport,
    "staged": lambda ops, mpi, options: StagedTransport(ops, in_host(ops, mpi, options)),
    "nccl": lambda ops, mpi, options: NcclTransport(ops, in_host(ops, mpi, options)),
}
LINKS = ("same socket", "same node", "between nodes")


def in_host(ops, mpi, options) -> MpiTransport:
    """Return what carries copies in host memory."""
    return MpiTransport(ops, mpi, options, ops.pinned)


class Group(NamedTuple):
    """Groups of ranks that are measured at the same time.

    groups: world ranks of each. comm, mpi: those of this rank's group, None outside. team: a bare
    communicator of all their ranks, on which they start and stop together; None outside.
    """

    groups: tuple[tuple[int, ...], ...]
    comm: Comm | None
    mpi: object
    team: object

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks of all groups, in the order of `team`."""
        return tuple(sorted(place for group in self.groups for place in group))

    def close(self) -> None:
        """Free the communicators. Comm: every member."""
        if self.comm is not None:
            self.comm.close()
            self.team.Free()


def make_wire(transport: str, ops, mpi):
    """Return a transport on this communicator. Comm: NCCL's, every member.

    Raises EnvironmentProblem if CuPy finds no NCCL.
    """
    if transport == "nccl" and not has_nccl():
        raise EnvironmentProblem(
            "--transport nccl needs NCCL, which CuPy cannot load here: install"
            " it with pip install '.[cuda]', or use --transport staged"
        )
    made = WIRES[transport](ops, mpi, Options(reach=mpi.size))
    return with_half_precision(made, ops, mpi.size, mpi.rank)


def make_group(groups, axis: str, transport: str, ops, world, recorder) -> Group:
    """Return the Group of these groups, with its communicators.

    Comm: two splits over the world; every rank must call it, member or not.
    """
    from mpi4py import MPI

    groups = tuple(map(tuple, groups))
    mine = next((k for k, group in enumerate(groups) if world.rank in group), None)
    inside = mine is not None
    color = mine if inside else MPI.UNDEFINED
    key = groups[mine].index(world.rank) if inside else 0
    mpi = world.Split(color, key)
    team = world.Split(0 if inside else MPI.UNDEFINED, world.rank)
    if not inside:
        return Group(groups, None, None, None)
    wire = make_wire(transport, ops, mpi)
    return Group(groups, Comm(axis, groups[mine], key, wire, recorder), mpi, team)


def comms_by(mpi, ops, recorder, algorithm: str) -> Comms:
    """Return groups of which "dp" is the whole communicator, whose sums use an algorithm.

    Comm: that of `Comms` over the communicator.
    """
    return Comms(
        Grid(mpi.rank, {"dp": mpi.size}), ops, recorder, mpi, Options(all_reduce=algorithm)
    )


def largest(mpi, numbers) -> list[int]:
    """Return the largest of all ranks' numbers, each separately. Comm: one all-reduce."""
    from mpi4py import MPI

    values = np.array(numbers, np.int64)
    mpi.Allreduce(MPI.IN_PLACE, values, op=MPI.MAX)
    return values.tolist()


def wait_politely(world, progress) -> None:
    """Wait at a barrier whose waiting ranks leave the cores and the memory alone."""
    request = world.Ibarrier()
    while not request.Test():
        progress.count += 1
        time.sleep(POLL_SECONDS)


def link_of(places: list[dict], ranks) -> str:
    """Return the slowest kind of link in a group; ranks without fixed sockets count as one node."""
    chosen = [places[number] for number in ranks]
    if len({place["host"] for place in chosen}) > 1:
        return LINKS[2]
    packages = {tuple(place["sockets"]) for place in chosen}
    return LINKS[0] if len(packages) == 1 and len(next(iter(packages))) == 1 else LINKS[1]
