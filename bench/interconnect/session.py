"""The parts that one benchmark launch shares: ranks and their places, memory, clock, file.

Bus bandwidth (busbw) has a bound: a link rate that the user states, or that of a memory copy. It is
the rate of one rank's link, one way. A stated rate belongs to the slowest kind of link in the job:
the link between hosts, if there are several. Inside a host MPI copies memory, so the copy rate
measured at the start is shown there for orientation. A message that is copied twice stays below
half of it; one that stays in the cache may exceed it.
"""

from __future__ import annotations

import json
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import results
from bench.interconnect import overlap
from bench.interconnect.buffers import Arena, cache_bytes
from bench.interconnect.cases import Setup
from bench.interconnect.groups import LINKS, comms_by, largest, link_of, make_group, wait_politely
from bench.interconnect.paired import Bidirectional
from bench.interconnect.places import place_fact
from bench.interconnect.plans import Job
from bench.interconnect.sampling import (
    ELSEWHERE,
    MEANING,
    Plan,
    Progress,
    measure_cases,
    on_common_clock,
)
from bench.interconnect.statistics import (
    bandwidths,
    half_width,
    last_share,
    skew_us,
    summary,
    times_us,
)
from bench.timing import seconds_of
from mpipar import ops as ops_module
from mpipar.comm.facts import broadcast_text, gather_facts
from mpipar.comm.record import Recorder
from mpipar.errors import EnvironmentProblem
from mpipar.job import watchdog
from mpipar.trace.clock import CommonClock, clock_identity, measure_clocks, shared_clocks

COPY_BYTES = 64 << 20
PEERS = ("least_to_peer_bytes", "most_to_peer_bytes")  # of an exchange of unequal parts
VARIABLES = re.compile(r"(MPI|UCX|FI_|OMPI|NCCL|SLURM_(JOB_ID|NNODES|NTASKS)|.*_NUM_THREADS)")


def copy_rate() -> float:
    """Return GB/s of a memory copy, best of three: an upper bound for messages inside a host."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
    return COPY_BYTES / min(seconds_of(partial(np.copyto, target, source), 3)) * 1e-9


def revision(root: Path = results.ROOT) -> str:
    """Return the commit of this checkout, read without starting a process; "" outside one."""
    try:
        head = (root / ".git" / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        return (root / ".git" / head[5:]).read_text().strip()
    except OSError:
        return ""


def make_ops(transport: str, dtype: str, host_rank: int):
    """Return array functions for the memory that the transport takes.

    On a GPU these are the plain functions: messages need no kernels, which older GPUs cannot run.
    Raises EnvironmentProblem without a usable GPU.
    """
    try:
        if transport == "mpi-host":
            return ops_module.make("cpu", dtype)
        return ops_module.make("cuda", dtype, kernels="plain", host_rank=host_rank)
    except EnvironmentProblem as error:  # its text names a flag of mpipar
        text = str(error).replace("--device cuda", f"--transport {transport}")
        raise EnvironmentProblem(text.replace("--device cpu", "--transport mpi-host")) from error


class Bench:
    """One launch. world: every rank; only world rank 0 has rows, prints and writes.

    loops: the library of bench.interconnect.compiled, if rows in C are measured. Comm: every rank
    must make it; if the GPU of one is not usable, all leave together.
    """

    def __init__(
        self, session, job: Job, footprint: int, plan: Plan, window: int = 64, *, loops=None
    ):
        self.session, self.world = session, session.world
        self.ops = session.agree(lambda: make_ops(job.transport, job.dtype, session.host_rank))
        self.job, self.plan, self.window, self.loops = job, plan, window, loops
        (most,) = largest(self.world, [footprint or cache_bytes()])
        self.recorder, self.progress = Recorder(phase="F"), Progress()
        self.arena = Arena(
            self.ops,
            job.buffers,
            most,
            ranks=len(session.host_ranks),
            touched=self.progress.advance,
        )
        self.places = gather_facts(self.world, place_fact(self.world.rank, self.ops))
        self.owners = shared_clocks(self.world, clock_identity())
        self.ahead_ns, self.clock_before = 0, {}
        self._look_at_clocks()
        self.stopped, self.refused = False, []
        self.latest, self.end = [], None  # rows of the last size; when a size must end, if ever

    def _look_at_clocks(self) -> None:
        """Measure how far this rank's clock is ahead of rank 0's. Comm: messages, one broadcast."""
        self.clock_before = measure_clocks(self.world, self.owners)
        text = json.dumps(
            {str(owner): sample.offset_ns for owner, sample in self.clock_before.items()}
        )
        offsets = json.loads(broadcast_text(self.world, text))
        self.ahead_ns = round(offsets.get(str(self.owners[self.world.rank]), 0))

    def crowded(self) -> bool:
        """Return whether some host has more ranks than cores (world rank 0)."""
        cores: dict = {}
        for place in self.places:
            host = cores.setdefault(place["host"], [0, set()])
            host[0] += 1
            host[1].update(place["cores"])
        return any(count > len(own) for count, own in cores.values())

    def head(self, argv, launch: int) -> dict:
        """Return the facts of the file's first line (world rank 0)."""
        from mpi4py import MPI

        clock = CommonClock(tuple(self.owners), self.clock_before, {})
        return {
            "machine": results.machine(),
            "library": " ".join(MPI.Get_library_version().splitlines()[0].split()),
            "launcher": self.session.launcher.name,
            "arguments": list(argv),
            "launch": launch,
            "revision": revision(),
            "ranks": self.world.size,
            "places": self.places,
            "clock": clock.describe(),
            "start": MEANING[self.plan.sync],
            "time": "last exit - first entry; latency, bandwidth, bidirectional: first rank alone",
            "transport": self.job.transport,
            "dtype": str(self.ops.dtype),
            "buffers": self.job.buffers,
            "footprint_bytes": self.arena.footprint,
            "crowded": self.crowded(),
            "memory_copy_GBps": copy_rate(),
            "plan": self.plan._asdict(),
            "environment": {
                name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)
            },
        }

    def watchdog(self, seconds: float):
        """End the job with a message after this many seconds without progress (0: never)."""
        return self.session.watch.following(
            lambda: (self.progress.count, self.progress.doing),
            lambda: watchdog.state_of(where=self.progress.doing),
            seconds,
        )

    def run(self, section, sizes=None) -> list[dict]:
        """Measure a section; return its rows on world rank 0. Comm: all ranks must call it."""
        group = make_group(
            section.groups, section.axis, self.job.transport, self.ops, self.world, self.recorder
        )
        rows = []
        for size in section.sizes if sizes is None else sizes:
            self.latest = self._one(section, group, size)
            rows += self.latest
            if self.stopped:
                break
        group.close()
        return rows

    def _one(self, section, group, size: int) -> list[dict]:
        fact: dict = {"ways": {}, "volume": {}}
        if group.team is not None:
            setup = Setup(
                group.comm,
                group.mpi,
                self.arena,
                size,
                self.window,
                self.loops,
                partial(comms_by, group.mpi, self.ops, self.recorder),
            )
            cases = {via: section.make(setup, via) for via in self.job.ways(section)}
            if section.num_tests is not None:
                cases = overlap.with_computing(group.team, section, setup, cases, self.progress)
            outcomes = measure_cases(
                group.team, cases, self.plan, self.progress, self._must_end, self.ahead_ns
            )
            case = next(iter(cases.values()))
            fact = {
                "ways": {via: list(outcome) for via, outcome in outcomes.items()},
                "volume": case.volume(),
                "window": case.window,
                "per_sample": case.per_sample,
                "in_place": case.in_place,
            }
            for one in cases.values():
                one.close()
        self.progress.doing = "waiting for the other groups"
        wait_politely(self.world, self.progress)
        facts, before = gather_facts(self.world, fact), self.clock_before
        self._look_at_clocks()
        clock = CommonClock(tuple(self.owners), before, self.clock_before)
        self.stopped = any(largest(self.world, [self.session.stop_requested]))
        return [] if facts is None else self._rows(section, group, facts, clock)

    def _must_end(self) -> bool:
        over = self.end is not None and time.monotonic() > self.end
        return self.session.stop_requested or over

    def _rows(self, section, group, facts, clock) -> list[dict]:
        rows = []
        for ranks in group.groups:
            new, size = {}, facts[ranks[0]]["volume"]["size_bytes"]
            for via in facts[ranks[0]]["ways"]:
                bad = [problem for number in ranks for problem in facts[number]["ways"][via][2]]
                count = len(facts[ranks[0]]["ways"][via][0])
                late = sorted(
                    {one for number in group.ranks for one in facts[number]["ways"][via][3]}
                )
                what = f"{section.title}, {size} bytes, {via}"
                if bad:
                    where = next((one for one in bad if one != ELSEWHERE), ELSEWHERE)
                    self.refused.append(f"{what}: {where}")
                elif count and len(late) == count:
                    self.refused.append(f"{what}: no iteration started in time; use --sync barrier")
                elif count:
                    entered, left = on_common_clock(
                        [fact["ways"] for fact in facts], ranks, via, clock
                    )
                    new[via] = self._row(section, ranks, via, facts, entered, left, late)
            rows += overlap.completed(new, section.num_tests)
        return rows

    def _row(self, section, ranks, via, facts, entered, left, late) -> dict:
        first = facts[ranks[0]]
        volumes = [facts[number]["volume"] for number in ranks]
        size = volumes[0]["size_bytes"]
        counted = max(volume.get("counted_bytes", size) for volume in volumes)
        slowest, share = last_share(left)
        start = entered.min()
        row = {
            "case": section.title,
            "via": via,
            "transport": self.job.transport,
            "axis": section.axis,
            "mode": section.mode,
            "ranks": list(ranks),
            "link": link_of(self.places, ranks),
            "dtype": str(self.ops.dtype),
            "buffers": self.job.buffers,
            "in_place": first["in_place"],
            "window": first["window"],
            "per_sample": first["per_sample"],
            "size_bytes": size,
            "count": size // self.ops.dtype.itemsize,
            "bytes_per_rank_in": max(volume["bytes_in"] for volume in volumes),
            "bytes_per_rank_out": max(volume["bytes_out"] for volume in volumes),
            "bytes_on_wire_per_rank": max(volume["wire_bytes"] for volume in volumes),
            "slowest_rank": ranks[slowest],
            "slowest_share": share,
            "checked": "ok" if self.plan.check else "unchecked",
            "sync": section.case.sync or self.plan.sync,
            "late": len(late),
            "late_at": late,
            "entered_ns": (entered - start).tolist(),
            "left_ns": (left - start).tolist(),
        }
        times = times_us(row)
        line = summary(times)
        if "messages" in volumes[0]:
            row["messages_per_s"] = volumes[0]["messages"] * 1e6 / line["median_us"]
        row |= {name: volumes[0][name] for name in PEERS if name in volumes[0]}
        return (
            row
            | line
            | {
                "converged": half_width(times) <= self.plan.target,
                "skew_us": skew_us(row),
                **bandwidths(section.title, len(ranks), counted, line["median_us"]),
            }
        )


STATED, COPY = "--bound-GBps", "memory copy"


class Bounds(NamedTuple):
    """stated_GBps: None if the user states nothing. copy_GBps: the rate of a memory copy."""

    stated_GBps: float | None
    copy_GBps: float
    transport: str
    several_hosts: bool

    def of(self, between_hosts: bool) -> tuple[str, float] | None:
        """Return (name of the bound, GB/s one way), or None if nothing is known."""
        if self.stated_GBps is not None and between_hosts == self.several_hosts:
            return STATED, self.stated_GBps
        if self.transport == "mpi-host" and not between_hosts:
            return COPY, self.copy_GBps
        return None

    def columns(self, row: dict) -> dict:
        """Return bound, bound_GBps, bound_percent of a row; {} for barriers and without a bound."""
        bound = self.of(row["link"] == LINKS[2])
        if bound is None or not row["busbw_GBps"]:
            return {}
        rate = bound[1] * (2 if row["case"] == Bidirectional.name else 1)  # it counts both ways
        return {
            "bound": bound[0],
            "bound_GBps": rate,
            "bound_percent": 100 * row["busbw_GBps"] / rate,
        }

    def describe(self) -> str:
        """Return the bounds of this job in one line."""
        parts = []
        for between_hosts in (False, True)[: 1 + self.several_hosts]:
            bound = self.of(between_hosts)
            rate = f"{bound[1]:.4g} GB/s ({bound[0]})" if bound else "unknown"
            parts.append(f"{rate} {'between hosts' if between_hosts else 'inside a host'}")
        return ", ".join(parts)
