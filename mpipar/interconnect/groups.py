"""Groups of ranks for a benchmark: their communicators, and who runs together."""

import math
from typing import Any, NamedTuple

from mpipar.comm.algorithms import ALGORITHMS
from mpipar.comm.device import DeviceTransport, StagedTransport
from mpipar.comm.grid import AXES, Grid
from mpipar.comm.group import Comm
from mpipar.comm.groups import cuda_aware, has_nccl, with_half_precision
from mpipar.comm.mpi import MpiTransport
from mpipar.comm.nccl import NcclTransport
from mpipar.comm.recorder import Recorder
from mpipar.comm.transport import Options, Transport
from mpipar.config.text import counted
from mpipar.errors import EnvironmentProblem, UsageError
from mpipar.interconnect.cases import CASES, Case
from mpipar.run.files.settings import expand_layout

Ranks = tuple[int, ...]


class Section(NamedTuple):
    """One case on some groups of world ranks at once.

    mode: "", or how the groups of a layout run: "alone" (the first) or "together".
    """

    case: Case
    groups: tuple[Ranks, ...]
    axis: str = "world"
    mode: str = ""


def world_sections(cases: list[Case], ranks: int) -> list[Section]:
    """Return every case on all ranks; those of two ranks on the first and the last."""
    ends, everyone = ((0, ranks - 1),), (tuple(range(ranks)),)
    return [
        Section(case, ends if case.pair else everyone, "pair" if case.pair else "world")
        for case in cases
    ]


def layout_sections(cases: list[Case], layout: dict[str, int]) -> list[Section]:
    """Return the cases on the groups of every axis: the first group alone, then all at once."""
    world = math.prod(layout.values())
    grids = [Grid(place, layout) for place in range(world)]
    found = []
    for axis in [axis for axis in AXES if layout[axis] > 1]:
        groups = tuple(sorted({grid.group(axis) for grid in grids}))
        modes = [(groups[:1], "alone")] + [(groups, "together")] * (len(groups) > 1)
        found += [Section(case, some, axis, mode) for case in cases for some, mode in modes]
    return found


def host_sections(hosts: list[str]) -> list[Section]:
    """Return the sums from which a machine sheet is made: inside each host, and over all ranks.

    hosts: of each rank.
    """
    members = {name: [k for k, own in enumerate(hosts) if own == name] for name in hosts}
    inside = tuple(tuple(own) for own in members.values() if len(own) > 1)
    inside *= len(members[hosts[0]]) > 1  # world rank 0 takes part
    found = [Section(CASES["all-reduce"], inside, "host", "together")] * bool(inside)
    everyone = tuple(range(len(hosts)))
    return found + [Section(CASES["all-reduce"], (everyone,), "hosts")] * (len(members) > 1)


class Team(NamedTuple):
    """The communicators of a section, for its members.

    comms: this rank's group, by the algorithm of sums. mpi: the group to bare mpi4py. team: all
    groups, which start and stop together.
    """

    comms: dict[str, Comm]
    mpi: Any
    team: Any

    def close(self) -> None:
        """Free them. Comm: every member."""
        for comm in self.comms.values():
            comm.close()
        self.team.Free()


def carrier(transport: str, ops: Any, mpi: Any, algorithm: str, crowded: bool) -> Transport:
    """Return what carries a group's arrays. Comm: that of NCCL and of the algorithm."""
    options = Options(reach=mpi.size, all_reduce=algorithm, yields_cpu=crowded)
    if transport == "mpi-host":
        found: Transport = ALGORITHMS[algorithm](ops, mpi, options)
    elif transport == "mpi-cuda":
        found = DeviceTransport(ops, mpi, options)
    else:
        staged = NcclTransport if transport == "nccl" else StagedTransport
        found = staged(ops, MpiTransport(ops, mpi, options, ops.pinned))
    return with_half_precision(found, ops, mpi.size, mpi.rank)


def make_team(
    section: Section,
    transport: str,
    ops: Any,
    world: Any,
    recorder: Recorder,
    algorithms: list[str],
    crowded: bool = False,
) -> Team | None:
    """Return this rank's communicators, or None if it is in no group.

    crowded: whether ranks share cores; then they wait as they do in training.

    Comm: two splits over the world, that of `carrier`, and a copy for each further algorithm.
    """
    from mpi4py import MPI

    mine = next((group for group in section.groups if world.rank in group), None)
    if mine is None:
        world.Split(MPI.UNDEFINED, 0)
        world.Split(MPI.UNDEFINED, 0)
        return None
    mpi, team = world.Split(mine[0], mine.index(world.rank)), world.Split(0, world.rank)
    comms = {
        name: Comm(
            section.axis,
            mine,
            mpi.rank,
            carrier(transport, ops, mpi.Dup() if name != "mpi" else mpi, name, crowded),
            recorder,
        )
        for name in ("mpi", *algorithms)
    }
    return Team(comms, mpi, team)


def check_transport(transport: str) -> None:
    """Raise EnvironmentProblem if this MPI or CuPy cannot use it."""
    if transport == "nccl" and not has_nccl():
        raise EnvironmentProblem(
            "--transport nccl needs NCCL, which CuPy cannot load here: pip install '.[cuda]', or"
            " use --transport staged"
        )
    if transport == "mpi-cuda" and cuda_aware() == "no":
        raise EnvironmentProblem(
            "--transport mpi-cuda: this MPI does not accept device memory; use --transport staged"
        )


def read_layout(text: str, ranks: int) -> dict[str, int]:
    """Return dp=2,tp=2 as the size of every axis. Raises UsageError."""
    found: list[str] = []
    sizes = dict.fromkeys(AXES, 1) | expand_layout({"layout": text}, found)
    product = math.prod(sizes.values())
    if product != ranks:
        found.append(f"--layout {text}: is for {counted(product, 'rank')}, not {ranks}")
    if found:
        raise UsageError(found)
    return sizes
