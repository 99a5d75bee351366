"""All groups of a rank: which ones exist, their transports, and how their sums travel."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mpipar.comm.checked import CallCheck
from mpipar.comm.connect import connect, split
from mpipar.comm.grid import AXES, ISLAND, Grid
from mpipar.comm.group import Comm
from mpipar.comm.hosts import cores_of, finish_passes_first
from mpipar.comm.launcher import check_world
from mpipar.comm.levels import LEVELED, LeveledComm, hosts_of, near_and_far
from mpipar.comm.record import Recorder
from mpipar.comm.request import Options
from mpipar.ops.functions import Ops

if TYPE_CHECKING:
    from mpi4py import MPI

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
        mpi_world: MPI.Intracomm | None = None,
        options: Options | None = None,
        partitions: Partitions | None = None,
        messages: Collection[str] = (),
    ):
        if mpi_world is not None:
            check_world(mpi_world, os.environ)
        self.grid, self.recorder, self.mpi_world, self.ops = grid, recorder, mpi_world, ops
        crowded = cores_of(mpi_world).crowded
        self.options = options = (options or Options())._replace(patient=crowded)
        if crowded:
            finish_passes_first()
        hosts = None
        if mpi_world is not None and options.all_reduce in LEVELED:
            hosts = hosts_of(mpi_world)

        def make(axis: str, ranks: tuple[int, ...], alone: bool = False) -> Comm:
            """Return this rank's Comm. alone: all groups on this axis have only one rank."""
            if alone:
                return Comm(axis, ranks, 0, None, recorder)
            place, check, levels = ranks.index(grid.world_rank), None, None
            stages = {grid.place_of(member, "pp") for member in ranks}
            own = self.options._replace(
                uneven=len(stages) > 1,
                reach=max(options.reach, axis in messages),
            )
            if axis in ("world", "inner"):  # they sum only a few numbers
                own = own._replace(all_reduce="mpi")
            elif hosts is not None and len(set(hosts)) > 1:
                levels, own = self._levels(axis, ranks, own, hosts)
            transport = connect(ops, mpi_world, ranks, own)
            if options.check and mpi_world is not None:
                check = CallCheck(split(mpi_world, ranks), ranks)
            if levels is not None:
                return LeveledComm(axis, ranks, place, transport, recorder, check, levels)
            return Comm(axis, ranks, place, transport, recorder, check)

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
        self.mpi_inner = mpi_world  # of all ranks of this island, for facts without a record
        if mpi_world is not None and grid.size(ISLAND) > 1:
            self.mpi_inner = split(mpi_world, grid.group(*AXES))
        super().__init__(
            self.groups | {name: self.groups[grid.same_as(name)] for name in grid.parts}
        )

    def _levels(
        self,
        axis: str,
        ranks: tuple[int, ...],
        options: Options,
        hosts: list[int],
    ) -> tuple[tuple[Comm, Comm, Comm] | None, Options]:
        """Return the levels of this rank's group if it needs them, and its own transport's options.

        Comm: three splits over the world, also by ranks whose group has no levels.
        """
        own = self.grid.world_rank
        found = near_and_far(ranks, hosts, own)
        near, far = found or ((own,), (own,))
        inside = "mpi" if options.all_reduce == "levels" else options.all_reduce

        def level(members: tuple[int, ...], algorithm: str) -> Comm:
            transport = connect(
                self.ops,
                self.mpi_world,
                members,
                options._replace(all_reduce=algorithm),
            )
            return Comm(axis, members, members.index(own), transport, self.recorder)

        groups = level(near, inside), level(far, "mpi"), level(near, "mpi")
        one_host = len({hosts[member] for member in ranks}) == 1
        return groups if found else None, options if one_host else options._replace(
            all_reduce="mpi"
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
