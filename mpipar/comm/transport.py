"""What a transport is, its requests, and the two of groups in which nothing travels.

`mpipar/comm/groups.py` chooses a transport for each group: MPI's own calls (`mpi.py`), those for
device memory (`device.py`, `nccl.py`), or further algorithms for sums (`mpipar/comm/algorithms/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, TypeAlias

from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Shape

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


New: TypeAlias = Callable[[Shape, "DTypeLike"], Array]  # makes an array
Counts: TypeAlias = Sequence[int]  # rows for each rank of a group, or from each
Exchanged: TypeAlias = tuple[Array, Counts]  # what arrived, and the rows from each rank


class Transport(Protocol):
    """How the arrays of one group travel; the docstrings of `Comm` describe each call.

    all_reduce, broadcast, reduce and all posted operations work in place: ireduce_scatter leaves
    this rank's part of the sum in x[0], and iall_gather finds its part in x[group_rank]. The
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
