"""The sections of a benchmark: which groups run which case at which sizes, as plain values."""

from __future__ import annotations

import math
from functools import partial
from itertools import combinations
from typing import NamedTuple

from bench.interconnect.cases import (
    ALGORITHMS,
    BARE,
    BY,
    COLLECTIVES,
    COMM,
    IN_C,
    IN_WINDOW,
    PERSISTENT,
    PREPARED,
    Posted,
    UnevenAllToAll,
)
from bench.interconnect.messages import PATTERNS, Barrier, Bisection, Hops, Program, hops_of
from bench.interconnect.noise import PLAIN, Noise
from bench.interconnect.paired import (
    Bandwidth,
    Bidirectional,
    Latency,
    MultiBandwidth,
    MultiLatency,
)
from bench.interconnect.routing import ROUTINGS
from mpipar.comm.grid import AXES, Grid
from mpipar.config.reading import expand_layout
from mpipar.config.sizes import read_bytes
from mpipar.errors import UsageError, suggestion
from mpipar.files.text import counted
from mpipar.ops.mixed_ops import DTYPES as MIXED

LEAST_FACTOR = 1.01  # from one size to the next
PAIR_CASES = {case.name: case for case in (Latency, Bandwidth, Bidirectional)}
GROUP_CASES = {
    case.name: case
    for case in (
        MultiLatency,
        MultiBandwidth,
        Bisection,
        PATTERNS["ring"],
        *COLLECTIVES.values(),
        PATTERNS["fan-in"],
        PATTERNS["fan-out"],
        Barrier,
        Noise,
    )
}
CASES = (*PAIR_CASES, "pairs", *GROUP_CASES, "stage-chain")
WITHOUT_LAYOUT = (*PAIR_CASES, "pairs", Noise.name)  # do not run on the groups of a layout
IN_PAIRS = (MultiLatency.name, MultiBandwidth.name)  # need an even number of ranks
WAYS = {
    "mpipar.comm": COMM,
    "mpi4py": BARE,
    "persistent": PERSISTENT,
    "C": IN_C,
    "algorithms": ALGORITHMS,
}
PLAIN_WAYS = (COMM, BARE)
KINDS = (
    {via: via for via in WAYS.values()}
    | {PREPARED: PERSISTENT}
    | dict.fromkeys((*BY, IN_WINDOW), ALGORITHMS)
)  # others: of mpi4py's
POSTED_CASES = (
    *(name for name, case in GROUP_CASES.items() if issubclass(case, Posted)),
    "stage-chain",
)
LEAST_BYTES = 8  # after 0
PAIR_SIZES = (8, 1 << 20)  # of the pair matrices: latency, bandwidth
CHAIN_SCHEDULES = ("1f1b", "interleaved")


class Section(NamedTuple):
    """One case at several sizes, on some groups at once.

    title: of the table. make(setup, via) -> Case. groups: of world ranks. mode: "" or how the
    groups of a layout run, "alone" or "together". num_tests: the number of Tests while computing,
    for a case that is overlapped.
    """

    title: str
    make: object
    groups: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    axis: str = "world"
    mode: str = ""
    num_tests: int | None = None

    @property
    def case(self) -> type:
        """The class of the case that `make` returns."""
        return getattr(self.make, "func", self.make)


class Job(NamedTuple):
    """What a job moves and how. kinds: of the ways to run a case that are wanted."""

    dtype: str = "float32"
    buffers: str = "rotated"
    transport: str = "mpi-host"
    kinds: tuple[str, ...] = PLAIN_WAYS

    def ways(self, section: Section) -> tuple[str, ...]:
        """Return the ways to run a section: those of its case that are wanted and possible."""
        return tuple(via for via in section.case.vias if via == PLAIN or self._has(section, via))

    def _has(self, section: Section, via: str) -> bool:
        """Return whether a way is wanted and possible.

        Bare calls need memory that this MPI can read. Untouched pages ("cold") cannot be known
        before the call. MPI cannot add numbers of 16 bits. A matrix of all pairs has only the plain
        ways.
        """
        case, kind = section.case, KINDS.get(via, BARE)
        plain_only = self.buffers == "cold" or section.title.startswith("pairs ")
        return kind in self.kinds and not (
            (self.transport in ("staged", "nccl") and via != COMM)
            or (self.transport != "mpi-host" and kind == ALGORITHMS)
            or (plain_only and kind not in PLAIN_WAYS)
            or (self.dtype in MIXED and case.sums and (via != COMM or case.wide))
        )


def size_problems(texts: dict[str, str]) -> list[str]:
    """Return the problems of {flag: text} of sizes."""
    found = []
    for flag, text in texts.items():
        try:
            read_bytes(text)
        except ValueError as error:
            found.append(f"{flag} {text!r}: {error}")
    return found


def geometric(begin: int, end: int, factor: float) -> tuple[int, ...]:
    """Return sizes from begin to end, each `factor` times the previous, rounded to whole bytes.

    If begin is 0: 0, then the smallest size that holds a number, and so on.
    """
    if begin < 0 or end < begin or not LEAST_FACTOR <= factor < math.inf:
        raise UsageError(
            f"sizes from {begin} to {end} bytes by a factor of {factor:g}: give "
            f"0 <= --begin-bytes <= --end-bytes and --factor {LEAST_FACTOR} or more"
        )
    sizes, size = [0] * (begin == 0), float(begin or LEAST_BYTES)
    while size <= end * 1.0001:
        sizes.append(round(size))
        size *= factor
    return tuple(dict.fromkeys(sizes))


def read_layout(text: str, world_size: int) -> dict[str, int]:
    """Return dp=2,tp=2 as axis sizes whose product is the number of ranks. Raises UsageError."""
    found: list[str] = []
    sizes = dict.fromkeys(AXES, 1) | expand_layout({"layout": text}, found)
    product = math.prod(sizes.values())
    if not found and product != world_size:
        found.append(
            f"--layout {text}: is for {counted(product, 'rank')}, but there are {world_size}"
        )
    if found:
        raise UsageError(found)
    return sizes


def case_problems(cases, layout: str | None, world_size: int) -> list[str]:
    """Return the problems of the choice of cases."""
    found = [
        f"no case {case!r}{suggestion(case, CASES)}; choose from {', '.join(CASES)}, all"
        for case in cases
        if case not in CASES
    ]
    if world_size < 2:
        found.append(
            "an interconnect needs at least 2 ranks: mpiexec -n 2 python -m bench.interconnect ..."
        )
    if layout is not None:
        found += [
            f"--layout has no groups for {case!r}; run it without --layout"
            for case in cases
            if case in WITHOUT_LAYOUT
        ]
    return found


def posted_cases(layout: str | None) -> tuple[str, ...]:
    """Return the cases that can be overlapped, because they are posted and waited for later.

    A layout's chains are whole schedules, which wait in between.
    """
    return (
        POSTED_CASES
        if layout is None
        else tuple(name for name in POSTED_CASES if name in GROUP_CASES)
    )


def overlap_problems(cases, layout: str | None, num_tests: int) -> list[str]:
    """Return the problems of overlapping these cases with computing."""
    some = posted_cases(layout)
    found = [
        f"--overlap: {case} is not posted and waited for; only {', '.join(some)} are"
        f"{'' if layout is None else ' with --layout'}"
        for case in cases
        if case in CASES and case not in some
    ]
    if num_tests < 0:
        found.append(f"--overlap {num_tests}: give the number of tests while computing, 0 or more")
    return found


def overlapped(sections, num_tests: int) -> list[Section]:
    """Return those of the sections that are posted and waited for, to overlap with computing."""
    return [
        one._replace(title=f"{one.title} overlapped K={num_tests}", num_tests=num_tests)
        for one in sections
        if issubclass(one.case, Posted)
    ]


def world_sections(cases, world_size: int, sizes) -> list[Section]:
    """Return every chosen case on all ranks; two-rank cases on the first and the last."""
    all_ranks = (tuple(range(world_size)),)
    found = []
    for name in cases:
        if name in PAIR_CASES:
            found.append(Section(name, PAIR_CASES[name], ((0, world_size - 1),), sizes, "pair"))
        elif name == "pairs":
            for one in combinations(range(world_size), 2):
                for case, size in zip((Latency, Bandwidth), PAIR_SIZES, strict=True):
                    found.append(Section(f"pairs {case.name}", case, (one,), (size,), "pair"))
        elif name == "stage-chain":
            found += chain_sections(world_size, sizes)
        else:
            case = GROUP_CASES[name]
            found.append(
                Section(name, case, in_pairs(name, all_ranks), sizes if case.sized else (0,))
            )
    return found


def routed(sections, routings) -> list[Section]:
    """Return the sections, with one of all-to-allv for each of some routings."""
    return [
        one
        if one.case is not UnevenAllToAll
        else one._replace(title=f"{one.title} {name}", make=partial(UnevenAllToAll, routing=name))
        for one in sections
        for name in (routings if one.case is UnevenAllToAll else ("",))
    ]


def routing_problems(routings, cases) -> list[str]:
    """Return the problems of the choice of routings."""
    found = [
        f"--routing: no routing {name!r}{suggestion(name, tuple(ROUTINGS))}; give some of"
        f" {','.join(ROUTINGS)}, or all"
        for name in routings
        if name not in ROUTINGS
    ]
    if UnevenAllToAll.name not in cases:
        found.append(f"--routing: belongs to {UnevenAllToAll.name}, which is not run; name it too")
    return found


def in_pairs(name: str, groups):
    """Return a case's groups; if it needs pairs, the last of an odd number of ranks is left out."""
    return tuple(group[: len(group) // 2 * 2] for group in groups) if name in IN_PAIRS else groups


def chain_sections(world_size: int, sizes) -> list[Section]:
    """Return each hop alone, all hops of each schedule together, and each schedule's messages."""
    all_ranks = (tuple(range(world_size)),)
    found = [
        Section("stage-chain hop", partial(Hops, hops=((0, 1),)), (hop,), sizes, "pp", "alone")
        for hop in hops_of("interleaved", world_size)
    ]
    for schedule in CHAIN_SCHEDULES:
        hops = hops_of(schedule, world_size)
        found.append(
            Section(
                f"stage-chain hops {schedule}",
                partial(Hops, hops=tuple(hops)),
                all_ranks,
                sizes,
                "pp",
                "together",
            )
        )
        found.append(
            Section(
                f"stage-chain {schedule}",
                partial(Program, schedule_name=schedule),
                all_ranks,
                sizes,
                "pp",
            )
        )
    return found


def left_out(cases, layout: str | None, wanted, job: Job) -> list[str]:
    """Return lines on cases for which the layout has no groups, or the job no way."""
    lines = []
    if layout is not None and "stage-chain" in cases and all(one.axis != "pp" for one in wanted):
        lines.append(
            f"stage-chain is left out: a chain of stages needs pp=2 or more, --layout is {layout}"
        )
    reasons: dict[str, list[str]] = {}
    for one in (one for one in wanted if not job.ways(one)):
        reason = "nothing of it runs with these --ways, --transport and --dtype"
        reasons.setdefault(reason, []).append(one.title)
    return lines + [
        f"left out: {', '.join(sorted(set(titles)))}: {reason}"
        for reason, titles in reasons.items()
    ]


def layout_sections(cases, layout: dict[str, int], sizes) -> list[Section]:
    """Return the chosen cases on every group of every axis: one group at a time, then all at once.

    Raises UsageError if there is nothing to run.
    """
    world_size = math.prod(layout.values())
    grids = [Grid(place, layout) for place in range(world_size)]
    found = []
    for axis in [axis for axis in AXES if layout[axis] > 1]:
        groups = tuple(sorted({grid.group(axis) for grid in grids}))
        modes = [((group,), "alone") for group in groups]
        modes += [(groups, "together")] if len(groups) > 1 else []
        for name in cases:
            if name == "stage-chain":
                makes = (
                    {
                        f"{name} {schedule}": partial(Program, schedule_name=schedule)
                        for schedule in CHAIN_SCHEDULES
                    }
                    if axis == "pp"
                    else {}
                )
            else:
                makes = {name: GROUP_CASES[name]}
            for title, make in makes.items():
                own = sizes if getattr(make, "sized", True) else (0,)
                found += [
                    Section(title, make, in_pairs(name, some), own, axis, mode)
                    for some, mode in modes
                ]
    if not found:
        raise UsageError(
            f"--layout has no groups for {', '.join(cases)}: a chain of stages needs pp=2 or more"
        )
    return found
