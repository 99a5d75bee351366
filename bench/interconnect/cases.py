"""The collective cases: each operation through `mpipar.comm`, as training calls it, and by mpi4py.

A case is one operation of one size on one group. `prepare` lays out the buffers of an iteration and
is not timed. `run` is timed. `check` compares the whole result, last element included, with the
expected one; each rank has a pattern of its own. Sizes follow nccl-tests: the whole vector for
all-reduce, the whole output for all-gather, the whole input for reduce-scatter and all-to-all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bench.interconnect.buffers import Arena
from mpipar.comm.group import Comm
from mpipar.comm.record import wire_bytes

COMM, BARE, BARE_UNEVEN = "mpipar.comm", "mpi4py", "mpi4py Reduce_scatter"
EXACT = 1 << 24  # up to here float32 holds every integer
APART = 1_000_003  # distance of neighbours' patterns; a prime, so that few patterns coincide
NAME = "bench"  # of the barrier in the records


class Setup(NamedTuple):
    """What a case runs on: the group as a Comm and as a bare communicator, memory, size.

    size: bytes asked for. window: messages in flight.
    """

    comm: Comm
    mpi: object
    arena: Arena
    size: int
    window: int = 64


def pattern(index: int, num_elements: int, dtype, terms: int = 1):
    """Numbers that identify sender and position; sums of `terms` of them are exact."""
    cycle = EXACT // terms - 1
    return ((np.arange(num_elements) + APART * index) % cycle + 1).astype(dtype)


def mismatch(ops, got, expected, where: str) -> list[str]:
    """A sentence that says how an array differs from the expected one; [] if it does not."""
    got = np.asarray(ops.to_host(got)).reshape(-1)
    expected = np.asarray(expected).reshape(-1)
    if got.shape != expected.shape:
        return [f"{where}: {got.size} elements came, not {expected.size}"]
    wrong = np.flatnonzero(got != expected)
    if not len(wrong):
        return []
    first = int(wrong[0])
    text = f"{where}: {len(wrong)} of {got.size} elements are wrong, the first at {first}: "
    return [text + f"{got[first]:g}, not {expected[first]:g}"]


class Case:
    """Base of the cases. size_bytes: what is really moved, after rounding to whole elements.

    per_sample: operations in one sample.
    """

    name = ""
    vias = (COMM, BARE)
    per_sample = 1
    sized = True
    in_place = False
    window = 1

    def __init__(self, setup: Setup, via: str):
        self.setup, self.comm, self.mpi, self.via = setup, setup.comm, setup.mpi, via
        self.ops = setup.arena.ops
        self.ranks, self.index = setup.comm.size, setup.comm.index
        self.item = self.ops.dtype.itemsize

    def elements(self, parts: int = 1) -> int:
        """Elements of the size asked for, a multiple of `parts`."""
        return max(1, round(self.setup.size / self.item / parts)) * parts

    def volume(self) -> dict:
        """size_bytes, bytes_in and bytes_out of a rank, and wire_bytes, which it sends."""
        raise AssertionError("each case says its volume")

    def put(self, x, values) -> None:
        """Write host values into a buffer."""
        x[:] = self.ops.asarray(np.ascontiguousarray(values, self.ops.dtype).reshape(x.shape))

    def wait(self, pending) -> None:
        """Wait until everything posted is done."""
        if self.via == COMM:
            pending.wait()
        else:
            pending.Wait()

    def test(self, pending) -> bool:
        """Whether everything posted is done; the call also lets it progress."""
        return pending.test() if self.via == COMM else pending.Test()

    def close(self) -> None:
        """Free the communicators that belong to the case alone. Comm: every member of the group."""


class Collective(Case):
    """One input, one output; in place where `output` is None. sums: it adds the ranks' numbers."""

    sums = False

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
        self.call = {COMM: self.through_comm, BARE: self.bare,
                     BARE_UNEVEN: getattr(self, "uneven", None)}[via]
        if via != COMM:
            from mpi4py import MPI
            self.in_place_marker = MPI.IN_PLACE

    def prepare(self) -> None:
        self.x = self.inputs.take()[0].reshape(self.shape_in())
        if self.inputs.views is None:
            self.x[...] = 0
        # mpipar.comm makes its outputs itself, as training does.
        if self.outputs is not None and self.via != COMM:
            self.y = self.outputs.take()[0].reshape(self.shape_out())

    def run(self):
        self.result = self.call()

    def check(self) -> list[str]:
        self.prepare()
        self.put(self.x, self.given())
        if self.outputs is not None and self.via != COMM:
            self.y[...] = -1
        self.run()
        found = mismatch(self.ops, self.result, self.expected(), f"rank {self.index}")
        self.x[...] = 0  # sums in place must not grow
        return found

    def pattern(self, index: int, parts: int = 1):
        return pattern(index, self.elements(parts) // parts, self.ops.dtype,
                       self.ranks if self.sums else 1)

    def given(self):
        return self.pattern(self.index)


class AllReduce(Collective):
    """An all-reduce: the sum of all ranks' vectors, in place."""

    name, in_place, sums = "all-reduce", True, True

    def through_comm(self):
        return self.comm.all_reduce(self.x, NAME)

    def bare(self):
        self.mpi.Allreduce(self.in_place_marker, self.x)
        return self.x

    def expected(self):
        return sum(self.pattern(index).astype(np.float64) for index in range(self.ranks))

    def volume(self):
        size = self.elements() * self.item
        return {"size_bytes": size, "bytes_in": size, "bytes_out": size,
                "wire_bytes": wire_bytes("all_reduce", size, self.ranks)}


class Blocks(Collective):
    """Base of the operations on an array with a part for each rank."""

    def volume(self):
        size = self.elements(self.ranks) * self.item
        operation = self.name.replace("-", "_")
        return {"size_bytes": size, "bytes_in": int(np.prod(self.shape_in())) * self.item,
                "bytes_out": int(np.prod(self.shape_out())) * self.item,
                "wire_bytes": wire_bytes(operation, size, self.ranks)}

    def parts(self) -> tuple[int, int]:
        return self.ranks, self.elements(self.ranks) // self.ranks

    def given(self):
        return [self.pattern(self.index * self.ranks + part, self.ranks)
                for part in range(self.ranks)]


class AllGather(Blocks):
    """An all-gather: every rank receives the parts of all ranks."""

    name = "all-gather"

    def shape_in(self):
        return self.parts()[1:]

    def shape_out(self):
        return self.parts()

    def through_comm(self):
        return self.comm.all_gather(self.x, NAME)

    def bare(self):
        self.mpi.Allgather(self.x, self.y)
        return self.y

    def given(self):
        return self.pattern(self.index, self.ranks)

    def expected(self):
        return [self.pattern(index, self.ranks) for index in range(self.ranks)]


class ReduceScatter(Blocks):
    """Each rank keeps the sum of its part; MPI has a form for equal parts and one for any parts."""

    name, sums = "reduce-scatter", True
    vias = (COMM, BARE, BARE_UNEVEN)

    def shape_in(self):
        return self.parts()

    def shape_out(self):
        return self.parts()[1:]

    def through_comm(self):
        return self.comm.reduce_scatter(self.x, NAME)

    def bare(self):
        self.mpi.Reduce_scatter_block(self.x, self.y)
        return self.y

    def uneven(self):
        ranks, count = self.parts()
        self.mpi.Reduce_scatter(self.x, self.y, recvcounts=[count] * ranks)
        return self.y

    def expected(self):
        return sum(self.pattern(index * self.ranks + self.index, self.ranks).astype(np.float64)
                   for index in range(self.ranks))


class AllToAll(Blocks):
    """An all-to-all: part j of each rank's array goes to rank j."""

    name = "all-to-all"

    def shape_in(self):
        return self.parts()

    def shape_out(self):
        return self.parts()

    def through_comm(self):
        return self.comm.all_to_all(self.x, NAME)

    def bare(self):
        self.mpi.Alltoall(self.x, self.y)
        return self.y

    def expected(self):
        return [self.pattern(index * self.ranks + self.index, self.ranks)
                for index in range(self.ranks)]


class Broadcast(Collective):
    """A broadcast: the first rank of the group sends its array to all others."""

    name = "broadcast"

    def through_comm(self):
        return self.comm.broadcast(self.x, 0, NAME)

    def bare(self):
        self.mpi.Bcast(self.x, root=0)
        return self.x

    def expected(self):
        return self.pattern(0)

    def volume(self):
        size = self.elements() * self.item
        return {"size_bytes": size, "bytes_in": size if self.index == 0 else 0, "bytes_out": size,
                "wire_bytes": wire_bytes("broadcast", size, self.ranks)}
