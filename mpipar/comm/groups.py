"""All groups of a rank: which ones exist, their transports, and how their sums travel."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mpipar.comm.collective_check import CollectiveCheck
from mpipar.comm.connect import connect, split
from mpipar.comm.grid import Grid
from mpipar.comm.group import Comm
from mpipar.comm.hosts import cores_of, use_batch_scheduling
from mpipar.comm.launcher import check_world
from mpipar.comm.record import Recorder
from mpipar.comm.request import Options
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
        oversubscribed = cores_of(mpi_world).oversubscribed
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
