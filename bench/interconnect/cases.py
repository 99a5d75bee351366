"""The collective cases: each operation through `mpipar.comm`, as training calls it, and by mpi4py.

A case is one operation of one size on one group. `prepare` lays out the buffers of an iteration and
is not timed. `run` is timed. `check` compares the whole result, last element included, with the
expected one; each rank has a pattern of its own. Sizes follow nccl-tests: the whole vector for
all-reduce and reduce, the whole output for all-gather and gather, the whole input for
reduce-scatter, all-to-all and scatter.

MPI knows no bfloat16 and cannot add float16. So bare calls move 16-bit numbers as integers, and the
sums of 16-bit numbers have the way of mpipar.comm alone.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from ml_dtypes import finfo

from bench.interconnect import compiled
from bench.interconnect.buffers import Arena, Slots
from mpipar.comm.group import Comm
from mpipar.comm.record import wire_bytes
from mpipar.config.run import SUMS

COMM, BARE, BARE_UNEVEN = "mpipar.comm", "mpi4py", "mpi4py Reduce_scatter"
BARE_PARTS = "mpi4py messages"
PERSISTENT, PREPARED, IN_C = "mpi4py persistent", "mpi4py prepared", "C"
ALGORITHMS = "algorithms"  # the kind of the ways by an algorithm of mpipar.comm
BY = {f"by {name}": name for name in SUMS if name not in ("mpi", "auto")}
IN_WINDOW = "by window, in it"  # of an array that lies there, as gradients do
METHODS = dict.fromkeys((COMM, *BY, IN_WINDOW), "through_comm") | {
    BARE: "bare", BARE_UNEVEN: "uneven", BARE_PARTS: "messages", PREPARED: "prepared", IN_C: "c"}
MOST_BITS = 24  # of the numbers in a payload: float32 holds every integer up to there
APART = 1_000_003  # distance of neighbours' patterns; a prime, so that few patterns coincide
NAME = "bench"  # of the barrier in the records


class Setup(NamedTuple):
    """What a case runs on: the group as a Comm and as a bare communicator, memory, size.

    size: bytes asked for. window: messages in flight. loops: the library of `compiled`.
    comms(algorithm): groups of which "dp" is this one, whose sums travel so.
    """

    comm: Comm
    mpi: object
    arena: Arena
    size: int
    window: int = 64
    loops: object = None
    comms: object = None


def pattern(index: int, num_elements: int, dtype, terms: int = 1):
    """Numbers that identify sender and position; sums of `terms` of them are exact."""
    bits = min(MOST_BITS, finfo(dtype).nmant + 1) if np.dtype(dtype).itemsize < 8 else MOST_BITS
    cycle = max(1, (1 << bits) // terms - 1)
    numbers = np.arange(num_elements, dtype=np.int32 if num_elements < 1 << 30 else np.int64)
    numbers += APART * index % cycle
    numbers %= cycle
    numbers += 1
    return numbers.astype(dtype)


def mismatch(ops, got, expected, where: str) -> list[str]:
    """A sentence that says how an array differs from the expected one; [] if it does not."""
    got = np.asarray(ops.to_host(got)).reshape(-1)
    expected = np.asarray(expected).reshape(-1).astype(got.dtype)
    if got.shape != expected.shape:
        return [f"{where}: {got.size} elements came, not {expected.size}"]
    wrong = np.flatnonzero(got != expected)
    if not len(wrong):
        return []
    first = int(wrong[0])
    text = f"{where}: {len(wrong)} of {got.size} elements are wrong, the first at {first}: "
    return [text + f"{float(got[first]):g}, not {float(expected[first]):g}"]


class Case:
    """Base of the cases. size_bytes: what is really moved, after rounding to whole elements.

    per_sample: operations in one sample. sync: how its iterations start, whatever the user chose.
    wide: mpipar.comm has it for float32 and float64 alone.
    """

    name = ""
    vias = (COMM, BARE)
    sync = None
    sums = wide = False
    per_sample = 1
    sized = True
    in_place = False
    window = 1

    def __init__(self, setup: Setup, via: str):
        self.setup, self.comm, self.mpi, self.via = setup, setup.comm, setup.mpi, via
        self.ops = setup.arena.ops
        self.ranks, self.index = setup.comm.size, setup.comm.index
        self.item = self.ops.dtype.itemsize
        if via != COMM:
            from mpi4py import MPI
            self.mpi4py = MPI

    def elements(self, parts: int = 1) -> int:
        """Elements of the size asked for, a multiple of `parts`; 0 bytes are 0 elements."""
        return max(self.setup.size > 0, round(self.setup.size / self.item / parts)) * parts

    def known(self, x):
        """The same memory in a type that the way knows: MPI does not know 16-bit numbers."""
        return x.view(np.uint16) if self.item == 2 and self.via != COMM else x

    def volume(self) -> dict:
        """size_bytes, bytes_in and bytes_out of a rank, and wire_bytes, which it sends; here 0."""
        return dict.fromkeys(("size_bytes", "bytes_in", "bytes_out", "wire_bytes"), 0)

    def put(self, x, values) -> None:
        """Write host values into a buffer."""
        x[:] = self.ops.asarray(np.ascontiguousarray(values, self.ops.dtype).reshape(x.shape))

    def wait(self, pending) -> None:
        """Wait until it is done."""
        if self.via == COMM:
            pending.wait()
        else:
            pending.Wait()

    def wait_all(self, pending) -> None:
        """Wait until all of these are done."""
        if self.via == COMM:
            for one in pending:
                one.wait()
        else:
            self.mpi4py.Request.Waitall(pending)

    def test(self, pending) -> bool:
        """Whether it is done; the call also lets it progress."""
        return pending.test() if self.via == COMM else pending.Test()

    def laid_out(self, count: int):
        """Yield the call of each of `count` iterations; its buffers are laid out just before it."""
        for _ in range(count):
            self.prepare()
            yield self.run

    def planned(self, plan):
        """The limits of `sampling.Plan` for this case."""
        return plan

    def in_c(self, team, samples: int):
        """(entered, left) of so many samples in C, each after a barrier of `team` unless None."""
        raise AssertionError(f"{self.name} has no loop in C")

    def close(self) -> None:
        """Free what belongs to the case alone. Comm: every member of the group."""


class Posted(Case):
    """Base of what is posted first and waited for later: `post` returns what is pending."""

    def post(self) -> list:
        raise AssertionError("each case posts its own")

    def run(self):
        self.wait_all(self.post())


class Collective(Case):
    """One input, one output; in place where `output` is None. sums: it adds the ranks' numbers.

    `prepare` leaves in `run` the call itself, with its arguments: nothing else is timed. operation:
    the name in the record whose bytes on the wire it has; "" for that of the case.
    """

    operation = ""

    def shape_in(self) -> tuple[int, ...]:
        """Shape of this rank's input."""
        return (self.elements(),)

    def shape_out(self) -> tuple[int, ...] | None:
        """Shape of this rank's output; None for operations in place."""
        return None

    def __init__(self, setup: Setup, via: str):
        super().__init__(setup, via)
        shape = self.shape_in()
        self.inputs = setup.arena.cut("send", 1, int(np.prod(shape)))
        shape = self.shape_out()
        self.outputs = setup.arena.cut("receive", 1, int(np.prod(shape))) if shape else None
        self.call = getattr(self, METHODS[via])

    def prepare(self) -> None:
        self.x = self.inputs.take()[0].reshape(self.shape_in())
        if self.inputs.views is None:
            self.x[...] = 0
        # mpipar.comm makes its outputs itself, as training does.
        self.y = self.x
        if self.outputs is not None and self.via != COMM:
            self.y = self.outputs.take()[0].reshape(self.shape_out())
        self.aim(self.call(self.known(self.x), self.known(self.y)))

    def aim(self, call) -> None:
        """Take the call that is to be timed."""
        self.run = call

    def laid_out(self, count: int):
        """As in C, all buffers are laid out before the first call; new ones would take memory."""
        calls = super().laid_out(count)
        return calls if self.inputs.views is None else list(calls)

    def check(self) -> list[str]:
        self.prepare()
        self.put(self.x, self.given())
        if self.y is not self.x:
            self.y[...] = -1
        made = self.run()
        result = made if self.outputs is not None and self.via == COMM else self.y
        found = mismatch(self.ops, result, self.expected(), f"rank {self.index}"
                         ) if self.has_result() else []
        self.x[...] = 0  # sums in place must not grow
        return found

    def has_result(self) -> bool:
        """Whether this rank gets a result."""
        return True

    def pattern(self, index: int, parts: int = 1):
        return pattern(index, self.elements(parts) // parts, self.ops.dtype,
                       self.ranks if self.sums else 1)

    def given(self):
        return self.pattern(self.index)

    def volume(self):
        own = int(np.prod(self.shape_in())) * self.item
        result = int(np.prod(self.shape_out() or self.shape_in())) * self.item
        size = max(own, result)
        wire = wire_bytes(self.operation or self.name.replace("-", "_"), size, self.ranks)
        return {"size_bytes": size, "bytes_in": own, "bytes_out": result, "wire_bytes": wire}


class AllReduce(Collective):
    """An all-reduce: the sum of all ranks' vectors, in place.

    Comm: by an algorithm, that of making a group of its own.
    """

    name, in_place, sums = "all-reduce", True, True
    operation = "all_reduce"  # also that of the other forms of it
    vias = (COMM, BARE, PREPARED, IN_C, *BY, IN_WINDOW)
    own = None  # groups that this case alone has

    def __init__(self, setup: Setup, via: str):
        if via in (*BY, IN_WINDOW):
            self.own = setup.comms(BY.get(via, "window"))
            setup = setup._replace(comm=self.own["dp"])
        super().__init__(setup, via)
        if via == IN_WINDOW:
            shape = len(self.inputs.views), self.elements()
            held = self.comm.zeros(self.ops, shape, self.ops.dtype, "buffers")
            self.inputs = Slots([*held], self.ops, 1, self.elements())

    def close(self):
        if self.own is not None:
            self.own.close()

    def through_comm(self, x, y):
        return partial(self.comm.all_reduce, x, NAME)

    def prepared(self, x, y):
        """The bare call with address, count and type, so that mpi4py need not ask the array."""
        kind = self.mpi4py.DOUBLE if self.item == 8 else self.mpi4py.FLOAT
        message = self.mpi4py.buffer.frombuffer(x), x.size, kind
        return partial(self.mpi.Allreduce, self.mpi4py.IN_PLACE, message)

    def bare(self, x, y):
        return partial(self.mpi.Allreduce, self.mpi4py.IN_PLACE, x)

    def c(self, x, y):
        return partial(self.loop, None, [x])

    def in_c(self, team, samples: int):
        return self.loop(team, [self.inputs.take()[0] for _ in range(samples)])

    def loop(self, team, xs):
        """Sum each of xs in C. Comm: an all-reduce for each; the team's barriers."""
        return compiled.run(self.setup.loops, "all_reduce", self.mpi, team, len(xs), xs=xs,
                            count=self.elements(), dtype=self.ops.dtype)

    def expected(self):
        return sum(self.pattern(index).astype(np.float64) for index in range(self.ranks))


class PostedAllReduce(Posted, AllReduce):
    """A posted all-reduce, as training uses it to sum gradients."""

    name, wide = "iall-reduce", True
    vias = (COMM, BARE)

    laid_out = Case.laid_out  # `post` has one call at a time

    def aim(self, call):
        self.start = call

    def through_comm(self, x, y):
        return partial(self.comm.iall_reduce, x, NAME)

    def bare(self, x, y):
        return partial(self.mpi.Iallreduce, self.mpi4py.IN_PLACE, x)

    def post(self):
        return [self.start()]


class Blocks(Collective):
    """Base of the operations on arrays with a part for each rank, from one into another."""

    def parts(self) -> tuple[int, int]:
        return self.ranks, self.elements(self.ranks) // self.ranks

    shape_in = shape_out = parts

    def given(self):
        return [self.pattern(self.index * self.ranks + part, self.ranks)
                for part in range(self.ranks)]


class AllGather(Blocks):
    """An all-gather: every rank receives the parts of all ranks."""

    name = "all-gather"

    def shape_in(self):
        return self.parts()[1:]

    def through_comm(self, x, y):
        return partial(self.comm.all_gather, x, NAME)

    def bare(self, x, y):
        return partial(self.mpi.Allgather, x, y)

    def given(self):
        return self.pattern(self.index, self.ranks)

    def expected(self):
        return [self.pattern(index, self.ranks) for index in range(self.ranks)]


class ReduceScatter(Blocks):
    """Each rank keeps the sum of its part; MPI has a form for equal parts and one for any parts."""

    name, sums = "reduce-scatter", True
    vias = (COMM, BARE, BARE_UNEVEN)

    def shape_out(self):
        return self.parts()[1:]

    def through_comm(self, x, y):
        return partial(self.comm.reduce_scatter, x, NAME)

    def bare(self, x, y):
        return partial(self.mpi.Reduce_scatter_block, x, y)

    def uneven(self, x, y):
        ranks, count = self.parts()
        return partial(self.mpi.Reduce_scatter, x, y, recvcounts=[count] * ranks)

    def expected(self):
        return sum(self.pattern(index * self.ranks + self.index, self.ranks).astype(np.float64)
                   for index in range(self.ranks))


class AllToAll(Blocks):
    """An all-to-all: part j of each rank's array goes to rank j."""

    name = "all-to-all"

    def through_comm(self, x, y):
        return partial(self.comm.all_to_all, x, NAME)

    def bare(self, x, y):
        return partial(self.mpi.Alltoall, x, y)

    def expected(self):
        return [self.pattern(index * self.ranks + self.index, self.ranks)
                for index in range(self.ranks)]
