"""One launch of the benchmark: ranks and their places, memory, sections, rows."""

import datetime as dt
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpipar import __version__
from mpipar import ops as ops_module
from mpipar.comm.hosts import quiet_barrier, shares_cores
from mpipar.comm.objects import gather_numbers, gather_objects
from mpipar.comm.recorder import Recorder
from mpipar.config.text import counted
from mpipar.errors import UsageError
from mpipar.interconnect import hosts
from mpipar.interconnect.arguments import BY, Arguments
from mpipar.interconnect.cases import BARE, CASES, COMM, IN_C, At, in_flight, rounds
from mpipar.interconnect.compiled import MOST_BYTES, Loops, loops_of
from mpipar.interconnect.files import SCHEMA, Row
from mpipar.interconnect.groups import (
    Section,
    Team,
    check_transport,
    host_sections,
    layout_sections,
    make_team,
    read_layout,
    world_sections,
)
from mpipar.interconnect.measure import (
    Arena,
    Operation,
    Plan,
    Progress,
    Samples,
    largest,
    measure,
    overlap,
)
from mpipar.interconnect.statistics import sample_us, summary
from mpipar.ops.mixed_ops import DTYPES as MIXED
from mpipar.run.process.mpi import library_name
from mpipar.run.trace.clock import clock_identity, shared_clocks

QUICK_SIZES, QUICK_ROOM, QUICK_SECONDS = (8, 64 << 10, 1 << 20), 16 << 20, 45.0
QUICK_PLAN, QUICK_WINDOW = Plan(0.05, 0.05, 5, 1), 16
SMALL = 8 << 10  # bytes: up to there, times hardly depend on the size
LEAST_SAMPLES = 8  # that a size takes at least: check, warm-up, turns
WAYS = {"comm": (COMM,), "mpi4py": (BARE,), "c": (IN_C,), "algorithms": BY}


def sizes_of(args: Arguments) -> tuple[int, ...]:
    """Return the sizes, each `factor` times the previous, rounded to whole bytes; 0 is one too."""
    if args.quick:
        return QUICK_SIZES
    sizes, size = [0] * (args.begin_bytes == 0), float(args.begin_bytes or 8)
    while size <= args.end_bytes * 1.0001:
        sizes.append(round(size))
        size *= args.factor
    return tuple(dict.fromkeys(sizes))


def ways_of(args: Arguments, section: Section) -> tuple[str, ...]:
    """Return the ways to run a section: those that are wanted and possible.

    Bare calls need memory that this MPI can read, and cannot add numbers of 16 bits.
    """
    case, found = section.case, list[str]()
    for via in (via for word in args.via.split(",") for via in WAYS[word]):
        bare, algorithm = via in (BARE, IN_C), via in BY
        possible = not (
            (algorithm and (case.name != "all-reduce" or args.transport != "mpi-host"))
            or (via == IN_C and not case.function)
            or (bare and args.transport in ("staged", "nccl"))
            or (args.dtype in MIXED and (bare or algorithm or case.posted))
        )
        found += [via] * possible
    return tuple(dict.fromkeys(found))


class Bench:
    """One launch. Only world rank 0 has rows. Comm: every rank must make it."""

    def __init__(self, session: Any, args: Arguments):
        self.session, self.args, self.world = session, args, session.world
        self.ops = session.agree(lambda: make_ops(args, session.host_rank))
        (room,) = largest(self.world, [hosts.cache_bytes()])
        room = 0 if args.buffers == "reused" else min(room, QUICK_ROOM) if args.quick else room
        self.progress, self.recorder = Progress(), Recorder(phase="F")
        self.arena = Arena(self.ops, room, self.progress.advance)
        self.places = gather_objects(self.world, hosts.place_fact(self.ops)) or []
        self.clocks = shared_clocks(self.world, clock_identity())
        self.crowded = shares_cores(self.world)
        self.refused: list[str] = []
        self.left_out: list[str] = []
        self.stopped, self.end = False, float("inf")
        self.plan = (
            QUICK_PLAN if args.quick else Plan(warm_up=args.warm_up, exactly=args.iterations)
        )
        self.sections = session.agree(self.choose)
        session.agree(self.check_room)
        needs_c = any(IN_C in ways_of(args, one) for one in self.sections)
        self.loops: Loops | None = loops_of(session) if needs_c else None

    def choose(self) -> list[Section]:
        """Return the sections of the flags. Raises UsageError, EnvironmentProblem."""
        args, ranks = self.args, self.world.size
        if ranks < 2:
            raise UsageError("an interconnect needs at least 2 ranks: mpiexec -n 2 mpipar net")
        check_transport(args.transport)
        cases = [
            CASES[name] for name in args.words or CASES if not (args.layout and CASES[name].pair)
        ]
        if args.layout:
            found = layout_sections(cases, read_layout(args.layout, ranks))
        else:
            found = world_sections(cases, ranks)
        if args.sheet:
            found += host_sections([str(one) for one in self.clocks])
        found = [one for one in found if ways_of(args, one)]
        if not found:
            raise UsageError("nothing is left to run with this --via, --transport and --dtype")
        return found

    def check_room(self) -> None:
        """Raise UsageError if the largest buffers do not fit, or are beyond what MPI can send."""
        from mpi4py import MPI

        args, size = self.args, sizes_of(self.args)[-1]
        at, messages = At(None, None, self.ops, size, args.window, self.arena.room), 1
        for one in self.sections:
            messages = (
                max(messages, rounds(at), in_flight(at)) if one.case.pair else max(messages, 2)
            )
            if IN_C in ways_of(args, one) and size > MOST_BYTES:
                raise UsageError("--via c: its counts are int; leave c out, or give -e below 2G")
        if size > MOST_BYTES and MPI.Get_version() < (4, 0):
            raise UsageError("this MPI has no counts beyond 2^31 (MPI 4 has): give a smaller -e")
        if self.ops.device == "cpu":
            needed = 2 * max(self.arena.room, size * messages)
            hosts.check_room(needed, len(self.session.host_ranks), hosts.free_bytes())

    def head(self, launcher: str | None, argv: list[str]) -> Row:
        """Return the facts of the file's first line (world rank 0)."""
        return {
            "schema": SCHEMA,
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "mpipar": __version__,
            "library": library_name(self.world),
            "launcher": launcher,
            "arguments": argv,
            "launch": self.args.launch,
            "ranks": self.world.size,
            "places": self.places,
            "hosts": hosts.describe(self.places),
            "transport": self.args.transport,
            "crowded": self.crowded,
            "memory_copy_GBps": hosts.copy_rate(),
            "environment": hosts.environment(),
        }

    def run(self, section: Section, sizes: tuple[int, ...], seconds: float) -> list[Row]:
        """Measure a section; return its rows on world rank 0. Comm: all ranks must call it.

        seconds: that its sizes may take; those that would take longer are left out.
        """
        algorithms = [via[3:] for via in ways_of(self.args, section) if via in BY]
        transport, recorder = self.args.transport, self.recorder
        team = make_team(
            section, transport, self.ops, self.world, recorder, algorithms, self.crowded
        )
        rows: list[Row] = []
        end, took, before = time.monotonic() + seconds, 0.0, SMALL
        for size in sizes:
            expected = took * max(1.0, size / before)
            late = self.world.rank == 0 and time.monotonic() + expected > end
            stopped, is_late = largest(self.world, [self.session.stop_requested, late])
            self.stopped = bool(stopped)
            if stopped or is_late:
                self.left_out.append(f"{section.case.name} from {size} bytes")
                break
            self.end, begun = end, time.monotonic()
            new = self.one(section, team, size)
            worst = max((row["median_us"] * row["per_sample"] for row in new), default=0.0)
            took = min(worst * 1e-6 * LEAST_SAMPLES * 2, time.monotonic() - begun)
            before, rows = max(SMALL, size), rows + new
        if team is not None:
            team.close()
        return rows

    def at(self, team: Team, via: str, size: int) -> At:
        """Return what an operation runs on."""
        comm = team.comms[via.removeprefix("by ") if via in BY else "mpi"]
        args, room = self.args, self.arena.room
        window = min(args.window, QUICK_WINDOW) if args.quick else args.window
        return At(comm, team.mpi, self.ops, size, window, room, args.routing or "hot")

    def one(self, section: Section, team: Team | None, size: int) -> list[Row]:
        """Return the rows of one size on world rank 0. Comm: the case, and gathers."""
        rows: list[Row] = []
        if team is not None:
            operations = {
                via: Operation(section.case, self.at(team, via, size), via, self.arena, self.loops)
                for via in ways_of(self.args, section)
            }
            samples = measure(team.team, operations, self.plan, self.progress, self.must_end)
            for via, operation in operations.items():
                more: Row = {}
                (late,) = largest(team.team, [self.must_end()])
                if section.case.posted and size and not late:
                    more = overlap(team.team, operation, self.args.overlap, self.progress)
                rows += [row | more for row in self.rows(section, team, operation, samples[via])]
        self.progress.doing = "waiting for the other groups"
        quiet_barrier(self.world)  # a group that is measured alone must not be disturbed
        return rows

    def must_end(self) -> bool:
        """Return whether the size must end, whatever is still to be measured."""
        return self.session.stop_requested or time.monotonic() > self.end

    def rows(self, section: Section, team: Team, one: Operation, own: Samples) -> list[Row]:
        """Return a row for each group on world rank 0. Comm: two gathers over the team."""
        wrong = gather_objects(team.team, own.wrong)
        numbers = gather_numbers(team.team, np.array([own.entered, own.left], float))
        if wrong is None or numbers is None:
            return []
        ranks = sorted(place for group in section.groups for place in group)
        name = f"{section.case.name} {self.args.routing or ''}".strip()
        name = name if section.case.name == "all-to-allv" else section.case.name
        if bad := [text for text in wrong if text]:
            self.refused.append(f"{name}, {one.at.size} bytes, {one.via}: {bad[0]}")
            return []
        if not numbers.shape[-1]:
            return []
        found = []
        for group in section.groups:
            places = [ranks.index(place) for place in group]
            found.append(self.row(section, name, group, one, numbers[places]))
        return found

    def row(
        self, section: Section, name: str, group: tuple[int, ...], one: Operation, numbers: Any
    ) -> Row:
        """Return the row of a group. numbers: (ranks, 2, samples)."""
        case, at = section.case, one.at
        entered, left = numbers[:, 0], numbers[:, 1]
        if case.pair:  # the first rank's clock counts, as in OSU's programs
            entered, left = entered[:1], left[:1]
        each, size = case.operations(at), case.size_bytes(at)
        clocks = [self.clocks[place] for place in group[: len(entered)]]
        times = sample_us(entered, left, clocks) / each
        last = np.bincount((left - entered).argmax(axis=0), minlength=len(group))
        line = summary(times)
        rate = size * (1 + case.both) / line["median_us"] * 1e-3 if line["median_us"] else 0.0
        return {
            "case": name,
            "via": one.via,
            "transport": self.args.transport,
            "axis": section.axis,
            "mode": section.mode,
            "ranks": list(group),
            "link": hosts.link_of(self.places, group),
            "dtype": str(self.ops.dtype),
            "buffers": self.args.buffers,
            "window": at.window if case.pair else 1,
            "per_sample": each,
            "size_bytes": size,
            "count": size // at.item,
            "bytes_on_wire_per_rank": int(size * case.bus(len(group))),
            "slowest_rank": group[int(last.argmax())],
            "slowest_share": float(last.max() / last.sum()),
            "checked": "ok",
            **line,
            "algbw_GBps": rate,
            "busbw_GBps": rate * case.bus(len(group)),
            "times_us": [round(time, 4) for time in times.tolist()],
        }


def make_ops(args: Arguments, host_rank: int) -> Any:
    """Return array functions for the memory that the transport takes.

    On a GPU these are the plain functions: messages need no kernels, which older GPUs cannot run.
    Raises EnvironmentProblem without a usable GPU.
    """
    if args.transport == "mpi-host":
        return ops_module.make("cpu", args.dtype)
    return ops_module.make("cuda", args.dtype, kernels="plain", host_rank=host_rank)


def sweep(bench: Bench, say: Callable[[list[Row]], None]) -> list[Row]:
    """Measure every section; hand its rows to say(). Comm: all ranks must call it."""
    rows: list[Row] = []
    end = time.monotonic() + (QUICK_SECONDS if bench.args.quick else float("inf"))
    for number, section in enumerate(bench.sections):
        share = (end - time.monotonic()) / (len(bench.sections) - number)
        new = bench.run(section, sizes_of(bench.args), share)
        say(new)
        rows += new
        if bench.stopped:
            break
    return rows


def left_out_text(bench: Bench) -> str:
    """Return what there was no time for, or ""."""
    count = counted(len(bench.left_out), "case")
    return f"not measured, {count}: {'; '.join(bench.left_out)}" if bench.left_out else ""
