"""What a transport is, and those of a single process, where nothing travels.

`mpipar/comm/connect.py` chooses a transport for each group. A transport's method is the algorithm:
`mpipar/comm/algorithms/` has those over MPI, `device.py` and `nccl.py` those for device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeAlias

from mpipar.comm.request import Done, Request
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Shape

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

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
