"""Overlap: how much of an operation is hidden by computing that runs at the same time.

Three things are measured in turn: the operation alone; computing alone, calibrated to take about as
long; and both together, which means: post, compute in K + 1 slices, wait. Between two slices a Test
is made of everything pending. An MPI library without a thread of its own moves a message only
inside its calls, so K matters.

Overlap in percent = 100 - (together - computing) / alone * 100, and never below 0. This is OSU's
formula; its T_cpu - T_test is `computing` here.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter

import numpy as np

from bench.interconnect.cases import Case, Setup
from bench.interconnect.groups import largest
from bench.interconnect.sampling import BarrierStart, batch

COMPUTING, BESIDE = "computing", " + computing"
NO_RATES = {"algbw_GBps": 0.0, "busbw_GBps": 0.0}
NO_BYTES = dict.fromkeys(("bytes_per_rank_in", "bytes_per_rank_out", "bytes_on_wire_per_rank"), 0)
# Of a matrix: three such matrices fit into any first-level cache, or one product fills a GPU.
SIDES = {"cpu": 32, "cuda": 1024}
TRIALS = 20  # runs of the operation that determine the length of computing
LEAST_SECONDS = 2e-4  # of computing, to calibrate it
TAKES = 5  # the fastest is taken: other processes can only add time


class Work:
    """Products of small matrices in num_tests + 1 slices. A GPU computes them while Python
    continues.
    """

    def __init__(self, ops, num_tests: int):
        self.ops, self.slices = ops, [1] * (num_tests + 1)
        side = SIDES[ops.device]
        self.x = ops.asarray(np.full((side, side), 1 / side, ops.dtype))

    def compute(self, count: int) -> None:
        """Compute `count` products; the numbers are the same each time."""
        for _ in range(count):
            self.ops.matmul(self.x, self.x)

    def calibrate(self, seconds: float) -> None:
        """Make all slices together take about `seconds` here, with at least one product in all."""
        count = 1
        while (spent := min(self.seconds(count) for _ in range(TAKES))) < LEAST_SECONDS:
            count *= 2
        total, parts = max(1, round(seconds / spent * count)), len(self.slices)
        self.slices = [total * (k + 1) // parts - total * k // parts for k in range(parts)]

    def seconds(self, count: int) -> float:
        """Return the time of `count` products."""
        start = perf_counter()
        self.compute(count)
        self.ops.synchronize()
        return perf_counter() - start

    def alone(self) -> None:
        """Run all slices."""
        for count in self.slices:
            self.compute(count)

    def beside(self, case) -> None:
        """Run all slices between posting and waiting, with a Test between two. Comm: the case."""
        pending = case.post()
        for count in self.slices[:-1]:
            self.compute(count)
            pending = [one for one in pending if not case.test(one)]
        self.compute(self.slices[-1])
        case.wait_all(pending)


class Computing(Case):
    """The case that runs the slices alone."""

    name = COMPUTING

    def __init__(self, setup: Setup, work: Work):
        super().__init__(setup, COMPUTING)
        self.run = work.alone

    def prepare(self):
        pass

    def check(self):
        return []


def with_computing(team, section, setup: Setup, cases: dict, progress) -> dict:
    """Return {way: case}: each way alone, computing alone, each way with computing.

    Comm: the first way, and one all-reduce over the team.
    """
    work = Work(setup.arena.ops, section.num_tests)
    work.calibrate(alone_seconds(team, next(iter(cases.values())), progress))
    found = cases | {COMPUTING: Computing(setup, work)}
    for via in cases:
        case = section.make(setup, via)
        case.run = partial(work.beside, case)  # so that the check covers this too
        found[via + BESIDE] = case
    return found


def alone_seconds(team, case, progress) -> float:
    """Return the median time of a case on the slowest rank. Comm: the case, and one all-reduce."""
    progress.doing = f"{case.name}, {case.setup.size} bytes, to calibrate the computing"
    entered, left, _ = batch(BarrierStart(team), case, TRIALS, progress)
    (slowest_ns,) = largest(team, [np.median(left - entered)])
    return slowest_ns * 1e-9


def completed(rows: dict, num_tests: int | None) -> list[dict]:
    """Return the rows {way: row} of one group and size, each with num_tests unless that is None.

    Those with computing get alone_us, computing_us and overlap_percent. They have no rates, because
    their time includes the computing.
    """
    if num_tests is None:
        return list(rows.values())
    found = []
    for via, row in rows.items():
        parts, more = (via.removesuffix(BESIDE), COMPUTING, via), {}
        if via == COMPUTING:
            more = NO_RATES | NO_BYTES
        elif via.endswith(BESIDE):
            more = NO_RATES
            if all(part in rows for part in parts):
                alone, computing, together = (rows[part]["median_us"] for part in parts)
                more = more | {
                    "alone_us": alone,
                    "computing_us": computing,
                    "overlap_percent": percent(alone, computing, together),
                }
        found.append(row | {"num_tests": num_tests} | more)
    return found


def percent(alone: float, computing: float, together: float) -> float:
    """Return the share of the operation that the computing hid, 0 to 100."""
    return min(100.0, max(0.0, 100 - (together - computing) / alone * 100))
