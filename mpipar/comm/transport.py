"""What a transport is, its requests, and two of them: MPI's own calls, and nothing that travels.

`mpipar/comm/groups.py` chooses a transport for each group. A transport's method is the algorithm:
`mpipar/comm/algorithms/` has further ones for sums, `device.py` and `nccl.py` those for device
memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np

from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Shape

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike


New: TypeAlias = Callable[[Shape, "DTypeLike"], Array]  # makes an array
Counts: TypeAlias = Sequence[int]  # rows for each rank of a group, or from each
Exchanged: TypeAlias = tuple[Array, Counts]  # what arrived, and the rows from each rank


class Transport(Protocol):
    """How the arrays of one group travel; the docstrings of `Comm` describe each call.

    all_reduce, broadcast, reduce and all posted operations work in place: ireduce_scatter leaves
    this rank's part of the sum in x[0], and iall_gather finds this rank's part in x[index]. The
    others return what arrived.

    carrier: what carries the bytes, as text. in_order: whether messages are matched by their order
    alone. If so, both of their ranks must post them in the same order, separately for even and for
    odd tags.
    """

    ops: Ops
    carrier: str
    in_order: bool

    def zeros(self, shape: Shape, dtype: DTypeLike, label: str) -> Array: ...
    def all_reduce(self, x: Array, op: str) -> None: ...
    def all_gather(self, x: Array, group_size: int) -> Array: ...
    def reduce_scatter(self, x: Array) -> Array: ...
    def all_to_all(self, x: Array) -> Array: ...
    def all_to_allv(self, x: Array, counts: Counts, received: Counts | None) -> Exchanged: ...
    def broadcast(self, x: Array, root: int) -> None: ...
    def reduce(self, x: Array, root: int) -> None: ...
    def barrier(self) -> None: ...
    def iall_reduce(self, x: Array) -> Request: ...
    def iall_gather(self, x: Array) -> Request: ...
    def ireduce_scatter(self, x: Array) -> Request: ...
    def isend(self, x: Array, peer: int, tag: int) -> Request: ...
    def irecv(self, x: Array, peer: int, tag: int) -> Request: ...
    def max_tag(self) -> int: ...
    def close(self) -> None: ...


class ShapesTransport:
    """One process and no data: the shapes-only run.

    Receives leave the array, which has no numbers, as it is.
    """

    carrier, in_order = "nobody", False

    ops: Ops

    def __init__(self, ops: Ops | None = None):
        if ops is not None:  # a group of one allocates nothing
            self.ops = ops

    def _nothing(self, *_: object) -> None:
        pass

    def _done(self, *_: object) -> Request:
        return Done()

    def zeros(self, shape: Shape, dtype: DTypeLike, label: str) -> Array:
        return self.ops.zeros(shape, dtype, label=label)

    all_reduce = broadcast = reduce = barrier = close = _nothing
    iall_reduce = iall_gather = ireduce_scatter = isend = irecv = _done

    def all_gather(self, x: Array, group_size: int) -> Array:
        return self.ops.empty((group_size, *x.shape), x.dtype, label="buffers")

    def reduce_scatter(self, x: Array) -> Array:
        return self.ops.empty(x.shape[1:], x.dtype, label="buffers")

    def all_to_all(self, x: Array) -> Array:
        return self.ops.empty(x.shape, x.dtype, label="buffers")

    def all_to_allv(self, x: Array, counts: Counts, received: Counts | None) -> Exchanged:
        """Return room for as many rows as are sent, from each rank as many as from any other."""
        if received is None:
            received = balanced(sum(counts), len(counts))
        return self.ops.empty((sum(received), *x.shape[1:]), x.dtype, label="buffers"), received

    def max_tag(self) -> int:
        return 2**30


class SelfTransport(ShapesTransport):
    """A group of one: it receives what it sends, and has no peer to send a message to."""

    def _nobody(self, *_: object) -> NoReturn:
        raise AssertionError("a group of one sends no messages")

    isend = irecv = _nobody

    def all_gather(self, x: Array, group_size: int) -> Array:
        return x.reshape(1, *x.shape)

    def reduce_scatter(self, x: Array) -> Array:
        return x.reshape(x.shape[1:])

    def all_to_all(self, x: Array) -> Array:
        return x

    def all_to_allv(self, x: Array, counts: Counts, received: Counts | None) -> Exchanged:
        return x, counts


def balanced(total: int, parts: int) -> list[int]:
    """Return numbers that differ by one at most, and whose sum is `total`."""
    return [total * (part + 1) // parts - total * part // parts for part in range(parts)]


POLLS_BEFORE_SLEEP = 20  # no sleep for a message that has nearly arrived
SLEEP_SECONDS, MOST_SLEEP_SECONDS = (
    50e-6,
    200e-6,
)  # the first sleep between two polls, and the longest


class Options(NamedTuple):
    """How the wire behaves.

    sync_sends: a send is done only when it is matched.
    check: compare every collective over its group first.
    yields_cpu: a rank that waits for a message yields its core in between.
    uneven: the members hold different stages, so they reach a sum at different times.
    reach: how many places apart, around the group, members may be that exchange messages all the
    time. NCCL connects these; others may exchange messages too, but more slowly.
    all_reduce: the algorithm of sums, a row of `mpipar.comm.algorithms`.
    """

    sync_sends: bool = False
    check: bool = False
    yields_cpu: bool = False
    uneven: bool = False
    reach: int = 0
    all_reduce: str = "mpi"


class Request(Protocol):
    """What a posted operation returns; it is called like an mpi4py request."""

    def Test(self) -> bool: ...
    def Wait(self) -> object: ...


class Done:
    """The request of an operation that needs no waiting."""

    def Test(self) -> bool:
        return True

    def Wait(self) -> None:
        pass


class PollingRequest:
    """A message that is polled with short sleeps, for hosts with more ranks than cores.

    MPI's own wait spins, and occupies the core that the awaited rank needs. Measured with 4 ranks
    on 2 cores: the default run's step takes 76 ms with sleeps of 50 us and 85 ms with Wait. Polls
    use some of the core too, so the sleeps of a long wait grow longer, which saves another 3 % of
    this step, and 7 % of that of 1f1b on four stages. Collectives stay with MPI, because their
    members arrive less than one sleep apart. Sums over ranks that hold different stages are the
    exception.
    """

    def __init__(self, request: Request):
        self.request = request
        self.Test = request.Test

    def Wait(self) -> None:
        for _ in range(POLLS_BEFORE_SLEEP):
            if self.request.Test():
                return
        nap = SLEEP_SECONDS
        while not self.request.Test():
            time.sleep(nap)
            nap = min(2 * nap, MOST_SLEEP_SECONDS)


class MpiTransport:
    """Hands arrays straight to MPI, whose library chooses the algorithm; others replace methods.

    Only upper-case mpi4py calls on buffers are used.

    new: makes an array to receive into; by default it is one of `ops`.
    """

    carrier, in_order = "MPI", False

    def __init__(
        self,
        ops: Ops,
        mpi_comm: MPI.Comm,
        options: Options,
        new: New | None = None,
    ):
        from mpi4py import MPI

        self.ops, self.mpi, self.options = ops, mpi_comm, options
        self.new = new or partial(ops.empty, label="buffers")
        self.in_place, self.reduce_ops = MPI.IN_PLACE, {"sum": MPI.SUM, "max": MPI.MAX}
        # Synchronous sends are done only when matched. A program that works with them never relies
        # on buffers inside MPI, whatever the message size.
        self.mpi_isend = mpi_comm.Issend if options.sync_sends else mpi_comm.Isend
        self.tag_ub: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # Open MPI sets it only there

    def zeros(self, shape: Shape, dtype: DTypeLike, label: str) -> Array:
        return self.ops.zeros(shape, dtype, label=label)

    def all_reduce(self, x: Array, op: str) -> None:
        """Sum x or take the maximum, in place. A rank that is early sleeps until all are here.

        Measured with 4 ranks on 2 cores, alternating without and with that: steps of gpipe take 13
        % less time, and those of 1f1b 5 %.
        """
        if self.options.yields_cpu and self.options.uneven:
            PollingRequest(self.mpi.Ibarrier()).Wait()
        self.mpi.Allreduce(self.in_place, x, self.reduce_ops[op])

    def iall_reduce(self, x: Array) -> Request:
        request: Request = self.mpi.Iallreduce(self.in_place, x)
        return request

    def all_gather(self, x: Array, group_size: int) -> Array:
        y = self.new((group_size, *x.shape), x.dtype)
        self.mpi.Allgather(x, y)
        return y

    def iall_gather(self, x: Array) -> Request:
        request: Request = self.mpi.Iallgather(self.in_place, x)
        return request

    def reduce_scatter(self, x: Array) -> Array:
        y = self.new(x.shape[1:], x.dtype)
        self.mpi.Reduce_scatter_block(x, y)
        return y

    def ireduce_scatter(self, x: Array) -> Request:
        request: Request = self.mpi.Ireduce_scatter_block(self.in_place, x)
        return request

    def all_to_all(self, x: Array) -> Array:
        y = self.new(x.shape, x.dtype)
        self.mpi.Alltoall(x, y)
        return y

    def all_to_allv(self, x: Array, counts: Counts, received: Counts | None) -> Exchanged:
        if received is None:
            received = self.counts_from(counts)
        y = self.new((sum(received), *x.shape[1:]), x.dtype)
        width = math.prod(x.shape[1:])
        self.mpi.Alltoallv(
            (x, [width * count for count in counts]), (y, [width * count for count in received])
        )
        return y, received

    def counts_from(self, counts: Counts) -> list[int]:
        """Return the rows that each rank sends here. counts: rows for each. Comm: one Alltoall."""
        received = np.empty(len(counts), np.int64)
        self.mpi.Alltoall(np.array(counts, np.int64), received)
        return [int(count) for count in received]

    def broadcast(self, x: Array, root: int) -> None:
        self.mpi.Bcast(x, root)  # mpi4py takes 0.2 us longer for a keyword

    def reduce(self, x: Array, root: int) -> None:
        here = self.mpi.rank == root
        self.mpi.Reduce(self.in_place if here else x, x if here else None, root=root)

    def barrier(self) -> None:
        self.mpi.Barrier()

    def isend(self, x: Array, peer: int, tag: int) -> Request:
        return self.polled(self.mpi_isend(x, peer, tag))

    def irecv(self, x: Array, peer: int, tag: int) -> Request:
        return self.polled(self.mpi.Irecv(x, peer, tag))

    def polled(self, request: Request) -> Request:
        """Return a request during whose wait this rank sleeps, if ranks share cores."""
        return PollingRequest(request) if self.options.yields_cpu else request

    def max_tag(self) -> int:
        return int(self.tag_ub)

    def close(self) -> None:
        self.mpi.Free()
