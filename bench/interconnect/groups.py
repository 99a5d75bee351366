"""Groups of ranks for a benchmark: their communicators, who runs together, who waits.

The other groups must not disturb a group that is measured alone, so they wait with long sleeps.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.interconnect.nccl import NcclTransport
from mpipar.comm.connect import Options
from mpipar.comm.device import DeviceTransport, StagedTransport
from mpipar.comm.group import Comm
from mpipar.comm.transport import HostTransport
from mpipar.job import gpus
from mpipar.job.environment import host_name

POLL_SECONDS = 0.5e-3
WIRES = {"mpi-host": HostTransport, "mpi-cuda": DeviceTransport, "staged": StagedTransport,
         "nccl": NcclTransport}
LINKS = ("same socket", "same node", "between nodes")


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
            self.comm.wire.close()
            self.team.Free()


def make_group(groups, axis: str, transport: str, ops, world, recorder) -> Group:
    """The Group of these groups, with its communicators.

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
    wire = WIRES[transport](ops, mpi, Options())
    return Group(groups, Comm(axis, groups[mine], key, wire, recorder), mpi, team)


def ranks_of_a_host(world, host_ranks) -> int:
    """The number of consecutive world ranks of each host; all ranks if hosts differ.

    host_ranks: those of this rank's host. Comm: one all-reduce over the world.
    """
    from mpi4py import MPI

    count, first = len(host_ranks), host_ranks[0]
    regular = first % count == 0 and host_ranks == tuple(range(first, first + count))
    most = np.array([count, -count, not regular], np.int64)
    world.Allreduce(MPI.IN_PLACE, most, op=MPI.MAX)
    return count if most[0] == -most[1] and not most[2] else world.size


def wait_politely(world, progress) -> None:
    """A barrier whose waiting ranks leave the cores and the memory alone."""
    request = world.Ibarrier()
    while not request.Test():
        progress.count += 1
        time.sleep(POLL_SECONDS)


def sockets(cores, folder: str = "/sys/devices/system/cpu") -> list[int]:
    """The processor packages of some cores; [-1] where the system does not say."""
    found = set()
    for core in cores:
        path = Path(folder) / f"cpu{core}" / "topology" / "physical_package_id"
        found.add(int(path.read_text()) if path.exists() else -1)
    return sorted(found)


def place_fact(world_rank: int, ops) -> dict:
    """Where this rank runs. If its arrays are on a GPU: gpu, its GPU, and gpus, all it sees."""
    cores = sorted(os.sched_getaffinity(0))
    own = {} if ops.device == "cpu" else gpus.fact(ops.xp, ops.xp.cuda.Device().id)
    return own | {"rank": world_rank, "host": host_name(os.environ), "cores": cores,
                  "sockets": sockets(cores)}


def link_of(places: list[dict], ranks) -> str:
    """The slowest kind of link in a group; ranks that may change sockets count as on one node."""
    chosen = [places[number] for number in ranks]
    if len({place["host"] for place in chosen}) > 1:
        return LINKS[2]
    packages = {tuple(place["sockets"]) for place in chosen}
    return LINKS[0] if len(packages) == 1 and len(next(iter(packages))) == 1 else LINKS[1]
