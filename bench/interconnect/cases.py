"""The collective cases: each operation through `mpipar.comm`, as training calls it, and by mpi4py.

COLLECTIVES has a row for each: what a rank gives, what it gets, and the calls. The root of those
that have one is the first rank.

A case is one operation of one size on one group. `prepare` lays out the buffers of an iteration and
is not timed. `run` is timed. `check` compares the whole result, last element included, with the
expected one; each rank has its own pattern. Sizes follow nccl-tests: the whole vector for
all-reduce and reduce, the whole output for all-gather and gather, the whole input for
reduce-scatter, all-to-all and scatter.

MPI does not know bfloat16 and cannot add float16, so bare calls move 16-bit numbers as integers,
and sums of 16-bit numbers exist only through mpipar.comm.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from ml_dtypes import finfo

from bench.interconnect import compiled
from bench.interconnect.buffers import Arena, Slots
from bench.interconnect.routing import shares
from mpipar.comm.grid import consecutive_slices
from mpipar.comm.group import Comm
from mpipar.comm.record import wire_bytes
from mpipar.config.run import SUMS

COMM, BARE, BARE_UNEVEN = "mpipar.comm", "mpi4py", "mpi4py Reduce_scatter"
BARE_PARTS = "mpi4py messages"
PERSISTENT, PREPARED, IN_C = "mpi4py persistent", "mpi4py prepared", "C"
ALGORITHMS = "algorithms"  # the kind of the ways by an algorithm of mpipar.comm
BY = {f"by {name}": name for name in SUMS if name != "mpi"}
BY_PARTS = ("by ring",)  # has its own all-gather and reduce-scatter
IN_WINDOW = "by window, in it"  # of an array inside the window, as gradients are
THROUGH_COMM = (COMM, *BY, IN_WINDOW)
METHODS = dict.fromkeys(THROUGH_COMM, "through_comm") | {
    BARE: "bare",
    BARE_UNEVEN: "uneven",
    BARE_PARTS: "messages",
    PREPARED: "prepared",
    IN_C: "c",
}
MOST_BITS = 24  # of the numbers in a payload: float32 holds every integer up to there
APART = 1_000_003  # distance of neighbours' patterns; a prime, so that few patterns coincide
NAME, TAG = "bench", 5  # of the barrier in the records; of messages


class Setup(NamedTuple):
    """What a case runs on: the group as a Comm and as a bare communicator, memory, size.

    size: bytes asked for. window: messages in flight. loops: the library of `compiled`.
    comms(algorithm): groups of which "dp" is this one, whose sums use that algorithm.
    """

    comm: Comm
    mpi: object
    arena: Arena
    size: int
    window: int = 64
    loops: object = None
    comms: object = None


def pattern(index: int, num_elements: int, dtype, terms: int = 1):
    """Return numbers that identify sender and position; sums of `terms` of them are exact."""
    bits = min(MOST_BITS, finfo(dtype).nmant + 1) if np.dtype(dtype).itemsize < 8 else MOST_BITS
    cycle = max(1, (1 << bits) // terms - 1)
    numbers = np.arange(num_elements, dtype=np.int32 if num_elements < 1 << 30 else np.int64)
    numbers += APART * index % cycle
    numbers %= cycle
    numbers += 1
    return numbers.astype(dtype)


def mismatch(ops, got, expected, where: str) -> list[str]:
    """Return a sentence on how an array differs from the expected one; [] if it does not."""
    got = np.asarray(ops.to_host(got)).reshape(-1)
    expected = np.asarray(expected).reshape(-1).astype(got.dtype)
    if got.shape != expected.shape:
        return [f"{where}: {got.size} elements arrived, not {expected.size}"]
    wrong = np.flatnonzero(got != expected)
    if not len(wrong):
        return []
    first = int(wrong[0])
    text = f"{where}: {len(wrong)} of {got.size} elements are wrong, the first at {first}: "
    return [text + f"{float(got[first]):g}, not {float(expected[first]):g}"]


class Case:
    """Base of the cases. size_bytes: what is really moved, after rounding to whole elements.

    per_sample: operations in one sample. sync: how its iterations start, overriding the user's
    choice. wide: mpipar.comm supports only float32 and float64 for it.
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
        """Return the number of elements for the size, a multiple of `parts`; 0 for 0 bytes."""
        return max(self.setup.size > 0, round(self.setup.size / self.item / parts)) * parts

    def known(self, x):
        """Return the same memory in a type that the way knows: MPI does not know 16-bit numbers."""
        return x.view(np.uint16) if self.item == 2 and self.via not in THROUGH_COMM else x

    def volume(self) -> dict:
        """Return size_bytes, bytes_in and bytes_out of a rank, and wire_bytes that it sends; here
        0.
        """
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
        """Return whether it is done; the call also lets it progress."""
        return pending.test() if self.via == COMM else pending.Test()

    def laid_out(self, count: int):
        """Yield the call of each of `count` iterations; its buffers are laid out just before it."""
        for _ in range(count):
            self.prepare()
            yield self.run

    def planned(self, plan):
        """Return the limits of `sampling.Plan` for this case."""
        return plan

    def in_c(self, team, samples: int):
        """Run `samples` samples in C; return (entered, left).

        team: a barrier of it precedes each sample, unless None.
        """
        raise AssertionError(f"{self.name} has no loop in C")

    def close(self) -> None:
        """Free what belongs to the case alone. Comm: every member of the group."""


class Posted(Case):
    """Base of what is posted first and waited for later: `post` returns what is pending."""

    def post(self) -> list:
        raise AssertionError("each case posts its own")

    def run(self):
        self.wait_all(self.post())


# What a rank gives or gets: its own vector, one part of it for each rank, or one part.
def whole(case: Collective) -> tuple[int, ...]:
    """Return the shape of a vector."""
    return (case.elements(),)


def parts(case: Collective) -> tuple[int, ...]:
    """Return the shape of a part for each rank."""
    return case.ranks, case.elements(case.ranks) // case.ranks


def part(case: Collective) -> tuple[int, ...]:
    """Return the shape of one part."""
    return parts(case)[1:]


class Collective(Case):
    """One input, one output; in place where `shape_out` is None. sums: it adds the ranks' numbers.

    `prepare` leaves in `run` the call itself, with its arguments: nothing else is timed. operation:
    the name in the record whose bytes on the wire it has; "" for that of the case. at_root: only
    the first rank gets the result. Comm: with an algorithm, that of making a separate group.
    """

    operation, at_root = "", False
    shape_in, shape_out = whole, None
    own = None  # groups of this case only, whose sums use an algorithm

    def __init__(self, setup: Setup, via: str):
        if via in (*BY, IN_WINDOW):
            self.own = setup.comms(BY.get(via, "window"))
            setup = setup._replace(comm=self.own["dp"])
        super().__init__(setup, via)
        self.given_shape = self.shape_in()
        self.result_shape = self.shape_out() if self.shape_out else None
        self.inputs = setup.arena.cut("send", 1, int(np.prod(self.given_shape)))
        self.outputs = (
            setup.arena.cut("receive", 1, int(np.prod(self.result_shape)))
            if self.result_shape
            else None
        )
        self.call = getattr(self, METHODS[via])

    def prepare(self) -> None:
        self.x = self.inputs.take()[0].reshape(self.given_shape)
        if self.inputs.views is None:
            self.x[...] = 0
        # mpipar.comm allocates its outputs itself, as in training.
        self.y = self.x
        if self.outputs is not None and self.via not in THROUGH_COMM:
            self.y = self.outputs.take()[0].reshape(self.result_shape)
        self.aim(self.call(self.known(self.x), self.known(self.y)))

    def aim(self, call) -> None:
        """Take the call that is to be timed."""
        self.run = call

    def laid_out(self, count: int):
        """Lay out all buffers before the first call, as C does; new ones would take memory."""
        calls = super().laid_out(count)
        return calls if self.inputs.views is None else list(calls)

    def check(self) -> list[str]:
        self.prepare()
        self.put(self.x, self.given(self.index))
        if self.y is not self.x:
            self.y[...] = -1
        made = self.run()
        returned = self.outputs is not None and self.via in THROUGH_COMM
        result = made if returned else self.y
        found = (
            []
            if self.at_root and self.index
            else mismatch(self.ops, result, self.expected(), f"rank {self.index}")
        )
        self.x[...] = 0  # sums in place must not grow
        return found

    def pattern(self, number: int, parts: int = 1):
        return pattern(
            number, self.elements(parts) // parts, self.ops.dtype, self.ranks if self.sums else 1
        )

    def given(self, sender: int):
        """Return what a rank gives."""
        if len(self.given_shape) > 1:
            return [self.part_for(sender, receiver) for receiver in range(self.ranks)]
        return self.pattern(sender, self.ranks if self.shape_in.__func__ is part else 1)

    def part_for(self, sender: int, receiver: int):
        """Return the part that a rank gives to another one."""
        return self.pattern(sender * self.ranks + receiver, self.ranks)

    def every(self, what, *more):
        """Yield what(sender) of each rank."""
        return (what(sender, *more) for sender in range(self.ranks))

    def expected(self):
        """Return the result: here what all give."""
        return [*self.every(self.given)]

    def volume(self):
        own = int(np.prod(self.given_shape)) * self.item
        result = int(np.prod(self.result_shape or self.given_shape)) * self.item
        size = max(own, result)
        wire = wire_bytes(self.operation or self.name.replace("-", "_"), size, self.ranks)
        found = {"size_bytes": size, "bytes_in": own, "bytes_out": result, "wire_bytes": wire}
        return found | self.of_root(found)

    def of_root(self, found: dict) -> dict:
        """Return what differs in the volume of the root, or of the others."""
        return {}

    def close(self):
        if self.own is not None:
            self.own.close()


def total(arrays):
    """Return the sum of arrays, in float64."""
    return sum(one.astype(np.float64) for one in arrays)


class AllReduce(Collective):
    """An all-reduce: the sum of all ranks' vectors, in place."""

    name, in_place, sums = "all-reduce", True, True
    operation = "all_reduce"  # also that of the other forms of it
    vias = (COMM, BARE, PREPARED, IN_C, *BY, IN_WINDOW)

    def __init__(self, setup: Setup, via: str):
        super().__init__(setup, via)
        if via == IN_WINDOW:
            shape = len(self.inputs.views), self.elements()
            held = self.comm.zeros(self.ops, shape, self.ops.dtype, "buffers")
            self.inputs = Slots([*held], self.ops, 1, self.elements())

    def through_comm(self, x, y):
        return partial(self.comm.all_reduce, x, NAME)

    def prepared(self, x, y):
        """Return the bare call with address, count and type: mpi4py need not ask the array."""
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
        return compiled.run(
            self.setup.loops,
            "all_reduce",
            self.mpi,
            team,
            len(xs),
            xs=xs,
            count=self.elements(),
            dtype=self.ops.dtype,
        )

    def expected(self):
        return total(self.every(self.given))


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


class UnevenAllToAll(Collective):
    """Part j goes to rank j, where an expert is; a routing determines how long it is.

    It uses MPI_Alltoallv, through mpipar.comm and by a bare call, or one bare message for each
    part. The size is about what the rank that receives most receives: parts are whole elements.
    """

    name = "all-to-allv"
    vias = (COMM, BARE, BARE_PARTS)

    def __init__(self, setup: Setup, via: str, routing: str = "hot"):
        ranks = setup.comm.size
        parts = np.array([shares(routing, ranks, 1, rank, ranks) for rank in range(ranks)])
        each = setup.size / setup.arena.ops.dtype.itemsize / parts.sum(axis=0).max()
        # Elements from each rank to each.
        self.parts = np.ceil(np.round(parts * each, 6)).astype(int)
        super().__init__(setup, via)

    def sent(self) -> list[int]:
        return self.parts[self.index].tolist()

    def received(self) -> list[int]:
        return self.parts[:, self.index].tolist()

    def shape_in(self):
        return (sum(self.sent()),)

    def shape_out(self):
        return (sum(self.received()),)

    def through_comm(self, x, y):
        sent, received = self.sent(), self.received()
        return lambda: self.comm.all_to_allv(x, sent, NAME, received)[0]

    def bare(self, x, y):
        return partial(self.mpi.Alltoallv, (x, self.sent()), (y, self.received()))

    def messages(self, x, y):
        others = [rank for rank in range(self.ranks) if rank != self.index]
        senders = [rank for rank in others if self.received()[rank]]
        others = [rank for rank in others if self.sent()[rank]]
        xs = [x[run] for run in consecutive_slices(self.sent())]
        ys = [y[run] for run in consecutive_slices(self.received())]

        def exchange():
            pending = [self.mpi.Irecv(ys[rank], rank, TAG) for rank in senders]
            pending += [self.mpi.Isend(xs[rank], rank, TAG) for rank in others]
            self.ops.copy(ys[self.index], xs[self.index])
            self.wait_all(pending)

        return exchange

    def parts_of(self, index: int) -> list:
        """Return what the rank at a place sends, by receiver."""
        parts = self.parts[index].tolist()
        whole = pattern(index, sum(parts), self.ops.dtype)
        return [whole[run] for run in consecutive_slices(parts)]

    def given(self, sender):
        return np.concatenate(self.parts_of(sender))

    def expected(self):
        return np.concatenate([self.parts_of(index)[self.index] for index in range(self.ranks)])

    def volume(self):
        own, others = self.parts[self.index], ~np.eye(self.ranks, dtype=bool)
        bytes_of = {
            "size_bytes": self.parts.sum(axis=0).max(),
            "bytes_in": own.sum(),
            "bytes_out": self.parts[:, self.index].sum(),
            "wire_bytes": own.sum() - own[self.index],
            "least_to_peer_bytes": self.parts[others].min(),
            "most_to_peer_bytes": self.parts[others].max(),
        }
        return {name: int(count) * self.item for name, count in bytes_of.items()}


def collective(name: str, base: type = Collective, **fields) -> type[Collective]:
    """Return the class of a row. fields: attributes and methods that differ from `Collective`."""
    return type(name, (base,), {"name": name, **fields})


COLLECTIVES = {
    case.name: case
    for case in (
        AllReduce,
        PostedAllReduce,
        collective(
            "reduce",
            AllReduce,
            operation="reduce",
            wide=True,
            vias=(COMM, BARE),
            at_root=True,
            through_comm=lambda case, x, y: partial(case.comm.reduce, x, 0, NAME),
            bare=lambda case, x, y: partial(
                case.mpi.Reduce, *((x, None) if case.index else (case.mpi4py.IN_PLACE, x)), root=0
            ),
            of_root=lambda case, found: {"bytes_out": 0} if case.index else {},
        ),
        collective(
            "all-gather",
            shape_in=part,
            shape_out=parts,
            vias=(COMM, BARE, *BY_PARTS),
            through_comm=lambda case, x, y: partial(case.comm.all_gather, x, NAME),
            bare=lambda case, x, y: partial(case.mpi.Allgather, x, y),
        ),
        collective(  # MPI has a form for equal parts and one for any parts
            "reduce-scatter",
            shape_in=parts,
            shape_out=part,
            sums=True,
            vias=(COMM, BARE, BARE_UNEVEN, *BY_PARTS),
            through_comm=lambda case, x, y: partial(case.comm.reduce_scatter, x, NAME),
            bare=lambda case, x, y: partial(case.mpi.Reduce_scatter_block, x, y),
            uneven=lambda case, x, y: partial(
                case.mpi.Reduce_scatter, x, y, recvcounts=[len(x[0])] * case.ranks
            ),
            expected=lambda case: total(case.every(case.part_for, case.index)),
        ),
        collective(  # mpipar.comm has no gather and no scatter
            "gather",
            shape_in=part,
            shape_out=parts,
            vias=(BARE,),
            at_root=True,
            bare=lambda case, x, y: partial(case.mpi.Gather, x, None if case.index else y, root=0),
            of_root=lambda case, found: (
                {"bytes_out": 0, "wire_bytes": found["bytes_in"]}
                if case.index
                else {"wire_bytes": 0}
            ),
        ),
        collective(
            "scatter",
            shape_in=parts,
            shape_out=part,
            vias=(BARE,),
            bare=lambda case, x, y: partial(case.mpi.Scatter, None if case.index else x, y, root=0),
            expected=lambda case: case.part_for(0, case.index),
            of_root=lambda case, found: (
                {"bytes_in": 0, "wire_bytes": 0}
                if case.index
                else {"wire_bytes": found["bytes_in"] - found["bytes_out"]}
            ),
        ),
        collective(
            "broadcast",
            through_comm=lambda case, x, y: partial(case.comm.broadcast, x, 0, NAME),
            bare=lambda case, x, y: partial(case.mpi.Bcast, x, root=0),
            expected=lambda case: case.given(0),
            of_root=lambda case, found: {"bytes_in": 0} if case.index else {},
        ),
        collective(
            "all-to-all",
            shape_in=parts,
            shape_out=parts,
            vias=(COMM, BARE),
            through_comm=lambda case, x, y: partial(case.comm.all_to_all, x, NAME),
            bare=lambda case, x, y: partial(case.mpi.Alltoall, x, y),
            expected=lambda case: [*case.every(case.part_for, case.index)],
        ),
        UnevenAllToAll,
    )
}
