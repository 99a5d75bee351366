"""Takes samples: ranks start together after a barrier; every time is kept, and none is averaged.

The ways of a case take turns in short batches, so that a slow spell of the machine hits all of
them. One rank of the team decides how many more samples each needs and tells the others, so that no
rank leaves a loop alone. The clock starts when a rank has left the barrier.

Overlap is how much of a posted sum is hidden by computing that runs at the same time. The sum
alone, computing alone (calibrated to take about as long), and both take turns: post, compute in
K + 1 slices with a Test between two, wait. An MPI library without a thread of its own moves a
message only inside its calls, so K matters. 100 - (together - computing) / alone * 100: OSU's
formula.
"""

import gc
from collections.abc import Callable
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from mpipar.interconnect.cases import BARE, IN_C, At, Case, chunks, pattern, repeated, wait_all
from mpipar.interconnect.compiled import Loops
from mpipar.interconnect.hosts import seconds_of
from mpipar.interconnect.statistics import half_width

TURNS = 10  # per budget: how often the ways take turns, and how soon a Ctrl-C is noticed
LEAST_TURNS = 5  # so that one slow spell of the machine never covers all samples of a way
MOST = 2000  # samples kept: more would not improve a median
MOST_SLOTS, LINE_BYTES = 4096, 64  # of buffers


class Plan(NamedTuple):
    """Limits of one way. budget: seconds for a size. target: half the median's interval over the
    median.

    warm_up: samples that are not kept, at least one. exactly: how many are, whatever time and
    target say; 0: these decide.
    """

    budget: float = 0.5
    target: float = 0.02
    least: int = 20
    warm_up: int = 5
    exactly: int = 0


class Progress:
    """The progress that the watchdog observes."""

    def __init__(self) -> None:
        self.count, self.doing = 0, "starting"

    def advance(self) -> None:
        """Say that something has been done."""
        self.count += 1


class Arena:
    """Touched memory for each of the roles "send" and "receive", which the cases share.

    Training sends freshly written data from many places, which buffers imitate that rotate through
    more memory than the last-level cache holds. The same array each time, as most other benchmarks
    have it, measures the cache.

    room: bytes that rotated buffers cycle through; 0: the same array each time. touched: called
    while memory is filled, because that takes long.
    """

    def __init__(self, ops: Any, room: int, touched: Callable[[], None] = lambda: None):
        self.ops, self.room, self.touched = ops, room, touched
        self.memory: dict[str, Any] = {}

    def views(self, role: str, shape: tuple[int, ...]) -> list[Any]:
        """Return arrays of this shape: as many as the room holds, at least one."""
        line = LINE_BYTES // self.ops.dtype.itemsize
        count, room = int(np.prod(shape)), self.room // self.ops.dtype.itemsize
        stride = -(-max(count, 1) // line) * line
        stride = max(stride, room // MOST_SLOTS // line * line)
        slots = max(1, room // stride)
        if role not in self.memory or self.memory[role].size < slots * stride:
            self.memory[role] = None  # free the old one first
            fresh = self.ops.zeros((max(slots * stride, room),), label="buffers")
            for start, stop in chunks(0, fresh.size):
                fresh[start:stop] = 0  # touch every page
                self.touched()
            self.memory[role] = fresh
        base = self.memory[role]
        return [base[k * stride : k * stride + count].reshape(shape) for k in range(slots)]


class Operation:
    """One case of one size, done one way on one group: its buffers, its check and its calls."""

    def __init__(self, case: Case, at: At, via: str, arena: Arena, loops: Loops | None = None):
        self.case, self.at, self.via, self.loops = case, at, via, loops
        bare = via in (BARE, IN_C)
        self.make = case.mpi4py if bare else case.comm
        self.wait = wait_all(bare)
        self.taken = case.taken(at) if case.taken else None
        self.returns = not bare and not case.is_messages  # mpipar.comm makes its outputs itself
        self.xs = arena.views("send", case.given(at))
        self.ys = arena.views("receive", self.taken) if self.taken is not None else self.xs
        self.next = 0

    def prepare(self) -> tuple[Callable[[], Any], Any, Any]:
        """Return the call of the next sample and its buffers."""
        x, y = self.xs[self.next % len(self.xs)], self.ys[self.next % len(self.ys)]
        self.next += 1
        call = self.make(self.at, x, y)
        return (partial(self.through, call) if self.case.posted else call), x, y

    def through(self, call: Callable[[], Any]) -> None:
        """Post an operation and wait for it."""
        self.wait([call()])

    def check(self, touched: Callable[[], None]) -> str:
        """Return what is wrong with what arrived on this rank, or "". Comm: the case."""
        at, case = self.at, self.case
        call, x, y = self.prepare()
        terms = at.ranks if case.sums else 1
        given, result = x.reshape(-1), y.reshape(-1)
        for start, stop in chunks(0, given.size):
            numbers = pattern(at.group_rank, start, stop, at.ops.dtype, terms).astype(at.ops.dtype)
            given[start:stop] = at.ops.asarray(numbers)
            touched()
        if self.taken is not None:
            result[:] = -1
        made = self.sample(call, x, y)
        if self.returns and self.taken is not None:
            result = (made[0] if case.name == "all-to-allv" else made).reshape(-1)
        wrong = 0
        for piece in case.pieces(at):
            for start, stop in chunks(0, piece.count):
                first, last = piece.offset + start, piece.offset + stop
                expected = sum(
                    pattern(one, first, last, at.ops.dtype, terms) for one in piece.senders
                )
                got = np.asarray(at.ops.to_host(result[piece.start + start : piece.start + stop]))
                wrong += int(np.count_nonzero(got != np.asarray(expected).astype(got.dtype)))
                touched()
        given[:] = 0  # sums in place must not grow
        return f"rank {at.group_rank}: {wrong} elements are wrong" if wrong else ""

    def sample(self, call: Callable[[], Any], x: Any, y: Any) -> Any:
        """Do it once. Comm: the case."""
        return self.in_c(None, [(x, y)]) if self.via == IN_C else call()

    def in_c(self, team: Any, buffers: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return (entered, left) of samples in C. team: a barrier of it precedes each."""
        assert self.loops is not None
        at, messages = self.at, self.case.is_messages
        each = partial(repeated, at) if self.case.name == "latency" else list
        xs = [one for x, _ in buffers for one in (each([*x]) if messages else [x])]
        ys = [one for _, y in buffers for one in each([*y])] if messages else []
        count = at.elements() * (at.item if messages else 1)
        return self.loops.run(self.case.function, at, team, len(buffers), xs=xs, ys=ys, count=count)

    def batch(self, team: Any, count: int, progress: Progress) -> tuple[Any, Any]:
        """Return (entered, left) in ns of `count` samples. Comm: a barrier and the case for each.

        All buffers are laid out before the first call: new ones would take memory.
        """
        prepared = [self.prepare() for _ in range(count)]
        if self.via == IN_C and count:
            progress.count += count
            return self.in_c(team, [one[1:] for one in prepared])
        entered, left = np.empty((2, count), np.int64)
        settle = self.at.ops.synchronize if self.at.ops.device != "cpu" else None
        for number, (call, _, _) in enumerate(prepared):
            if settle:
                settle()
            team.Barrier()
            begun = perf_counter_ns()
            call()
            if settle:
                settle()
            left[number] = perf_counter_ns()
            entered[number] = begun
            progress.count += 1
        return entered, left


def largest(mpi: Any, numbers: list[Any]) -> list[int]:
    """Return the largest of all ranks' numbers, each separately. Comm: one all-reduce."""
    from mpi4py import MPI

    values = np.array(numbers, np.int64)
    mpi.Allreduce(MPI.IN_PLACE, values, op=MPI.MAX)
    return [int(value) for value in values]


def enough(durations_s: Any, spent_s: float, plan: Plan) -> bool:
    """Return whether one way has been measured precisely enough, or for long enough."""
    count = len(durations_s)
    if plan.exactly:
        return count >= plan.exactly
    if count >= plan.least and (spent_s >= plan.budget or half_width(durations_s) <= plan.target):
        return True
    return count >= MOST or spent_s >= 4 * plan.budget


def batch_size(durations_s: Any, plan: Plan, kept: int) -> int:
    """Return how many samples take one turn's share of the budget; kept: how many there are."""
    if plan.exactly:
        return min(-(-plan.exactly // TURNS), plan.exactly - kept)
    if not len(durations_s):
        return 1
    typical = max(float(np.median(durations_s)), 1e-7)
    return max(1, min(MOST // TURNS, int(plan.budget / TURNS / typical)))


class Samples(NamedTuple):
    """What this rank has measured of one way: ns of its own clock, and what was wrong."""

    entered: list[int]
    left: list[int]
    wrong: str


def measure(
    team: Any,
    operations: dict[str, Operation],
    plan: Plan,
    progress: Progress,
    stopping: Callable[[], bool],
) -> dict[str, Samples]:
    """Return {way: Samples} of this rank; all ways continue until each has enough.

    stopping(): whether this rank was asked to end. Comm: the cases; on the team a barrier for each
    sample, and one all-reduce for each turn.
    """
    found: dict[str, Samples] = {}
    for via, one in operations.items():
        progress.doing = f"check of {one.case.name}, {one.at.size} bytes, {via}"
        found[via] = Samples([], [], one.check(progress.advance))
    *bad, over = largest(team, [*(bool(one.wrong) for one in found.values()), stopping()])
    running = [via for via, is_bad in zip(operations, bad, strict=True) if not (is_bad or over)]
    counts, spent = [max(1, plan.warm_up)] * len(running), dict.fromkeys(running, 0.0)
    gc.disable()
    for turn in range(MOST if running else 0):  # turn 0 is the warm-up and is not kept
        orders = []
        for via, count in zip(running, counts, strict=True):
            own = found[via]
            progress.doing = f"{operations[via].case.name}, {operations[via].at.size} bytes, {via}"
            start = perf_counter()
            entered, left = operations[via].batch(team, count, progress)
            if turn:
                spent[via] += perf_counter() - start
                own.entered.extend(entered.tolist())
                own.left.extend(left.tolist())
            orders.append(batch_size((left - entered) * 1e-9, plan, len(own.left)))
        done = turn >= LEAST_TURNS and all(
            enough(np.subtract(found[via].left, found[via].entered) * 1e-9, spent[via], plan)
            for via in running
        )
        first = team.rank == 0
        told = [*(count * first for count in orders), first and not done, stopping()]
        *counts, going, stopped = largest(team, told)  # all but the first rank give 0
        if stopped or not going:
            break
    gc.enable()
    return found


# Of a matrix: three such matrices fit into any first-level cache, or one product fills a GPU.
SIDES = {"cpu": 32, "cuda": 1024}
MOST_SAMPLES, TAKES, LEAST_SECONDS, SECONDS = 40, 5, 2e-4, 0.5


class Work:
    """Products of small matrices in num_tests + 1 slices."""

    def __init__(self, ops: Any, num_tests: int):
        self.ops, self.parts, self.slices = ops, num_tests + 1, [1]
        side = SIDES[ops.device]
        self.x = ops.asarray(np.full((side, side), 1 / side, ops.dtype))

    def compute(self, count: int) -> None:
        """Compute `count` products; the numbers are the same each time."""
        for _ in range(count):
            self.ops.matmul(self.x, self.x)

    def alone(self) -> None:
        """Run all slices."""
        for count in self.slices:
            self.compute(count)
        self.ops.synchronize()

    def calibrate(self, seconds: float) -> None:
        """Make all slices together take about `seconds` here, with at least one product in all."""
        count, spent = 1, 0.0
        while spent < LEAST_SECONDS:
            count *= 2
            self.slices = [count]
            spent = min(seconds_of(self.alone, TAKES))
        total, parts = max(1, round(seconds / spent * count)), self.parts
        self.slices = [total * (k + 1) // parts - total * k // parts for k in range(parts)]

    def beside(self, call: Callable[[], Any], wait: Callable[[list[Any]], Any]) -> None:
        """Run all slices between posting and waiting, with a Test between two."""
        pending = call()
        for count in self.slices[:-1]:
            self.compute(count)
            pending.Test()
        self.compute(self.slices[-1])
        wait([pending])


def percent(alone: float, computing: float, together: float) -> float:
    """Return the share of the operation that the computing hid, 0 to 100."""
    return min(100.0, max(0.0, 100 - (together - computing) / alone * 100))


def overlap(team: Any, operation: Operation, num_tests: int, progress: Progress) -> dict[str, Any]:
    """Return the columns of a posted operation: medians on the slowest rank. Comm: the operation,
    barriers, and two all-reduces over the team.
    """
    work, (sum_alone, x, y) = Work(operation.at.ops, num_tests), operation.prepare()
    both = partial(work.beside, operation.make(operation.at, x, y), operation.wait)
    (first_ns,) = largest(team, [1e9 * np.median(seconds_of(sum_alone, TAKES))])
    work.calibrate(first_ns * 1e-9)
    taken: list[list[float]] = []
    for _ in range(min(MOST_SAMPLES, max(TAKES, int(SECONDS * 1e9 / (3 * first_ns))))):
        row = []
        for call in (sum_alone, work.alone, both):
            team.Barrier()
            row += seconds_of(call, 1)
            progress.advance()
        taken.append(row)
    medians_ns = largest(team, (1e9 * np.median(taken, axis=0)).tolist())
    alone, computing, together = (one * 1e-3 for one in medians_ns)
    return {
        "num_tests": num_tests,
        "alone_us": alone,
        "computing_us": computing,
        "overlap_percent": percent(alone, computing, together),
    }
