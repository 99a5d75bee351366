"""Transport for 16-bit numbers: MPI does not know bfloat16 and cannot add it.

This layer sits between a Comm and its transport. Data that only moves is sent as 16-bit integers.
The parts of a sum also travel in 16 bits, which halves the bytes: an all-to-all gives each rank all
ranks' parts of its chunk, the rank adds them in float32 and rounds once, and an all-gather joins
the chunks. These are as many bytes as a ring all-reduce sends. Of a small array every rank gets all
parts. In both cases they are added in the order of the group, so all ranks have the same numbers.

Arrays of other types pass unchanged. Weight gradients are float32, and MPI sums them.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size
from mpipar.comm.transport import Counts, Exchanged, Request, Transport
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array

SMALL = 1 << 14  # bytes up to which every rank adds up whole arrays, in one collective


class HalfPrecisionTransport:
    """A transport for groups of `group_size` ranks whose ops have a 16-bit dtype.

    group_rank: this rank's number in the group.
    """

    def __init__(self, transport: Transport, ops: Ops, group_size: int, group_rank: int):
        self.transport, self.ops, self.group_size = transport, ops, group_size
        self.group_rank = group_rank
        self.barrier, self.zeros = transport.barrier, transport.zeros
        self.max_tag, self.close = transport.max_tag, transport.close
        self.carrier, self.in_order = transport.carrier, transport.in_order
        # These sum float32 only: gradients, and weights that are saved.
        self.iall_reduce, self.ireduce_scatter = transport.iall_reduce, transport.ireduce_scatter
        self.reduce = transport.reduce

    def _is_narrow(self, x: Array) -> bool:
        return bool(x.dtype == self.ops.dtype)

    def _moved(self, x: Array) -> Array:
        """Return the same memory, in a type that MPI knows."""
        return x.view("uint16") if self._is_narrow(x) else x

    def _received(self, y: Array, x: Array) -> Array:
        """Return the received memory, in the type of x."""
        return y.view(x.dtype) if self._is_narrow(x) else y

    def all_reduce(self, x: Array, op: str) -> None:
        if not self._is_narrow(x):
            self.transport.all_reduce(x, op)
            return
        assert op == "sum", op
        if x.nbytes <= SMALL:
            self.ops.add_parts(self.all_gather(x, self.group_size), x)
            return
        parts = self.chunks(x)
        self.ops.add_parts(self.all_to_all(parts), parts[self.group_rank])
        self.ops.synchronize()
        self.iall_gather(parts).Wait()
        if parts.size > x.size:
            self.ops.copy(x.reshape(-1), parts.reshape(-1)[: x.size])

    def chunks(self, x: Array) -> Array:
        """Return x as one chunk per rank: its own memory, or a zero-padded copy."""
        if x.size % self.group_size == 0:
            return x.reshape(self.group_size, -1)
        length = chunk_size(x.size, self.group_size)
        parts = self.ops.zeros((self.group_size, length), label="buffers")
        self.ops.copy(parts.reshape(-1)[: x.size], x.reshape(-1))
        self.ops.synchronize()  # they are computed here, after Comm has drained the stream
        return parts

    def iall_gather(self, x: Array) -> Request:
        return self.transport.iall_gather(self._moved(x))

    def reduce_scatter(self, x: Array) -> Array:
        if not self._is_narrow(x):
            return self.transport.reduce_scatter(x)
        return self.ops.add_parts(
            self.all_to_all(x), self.ops.empty(x.shape[1:], x.dtype, label="buffers")
        )

    def all_gather(self, x: Array, group_size: int) -> Array:
        return self._received(self.transport.all_gather(self._moved(x), group_size), x)

    def all_to_all(self, x: Array) -> Array:
        return self._received(self.transport.all_to_all(self._moved(x)), x)

    def all_to_allv(self, x: Array, counts: Counts, received: Counts | None) -> Exchanged:
        y, received = self.transport.all_to_allv(self._moved(x), counts, received)
        return self._received(y, x), received

    def broadcast(self, x: Array, root: int) -> None:
        self.transport.broadcast(self._moved(x), root)

    def isend(self, x: Array, peer: int, tag: int) -> Request:
        return self.transport.isend(self._moved(x), peer, tag)

    def irecv(self, x: Array, peer: int, tag: int) -> Request:
        return self.transport.irecv(self._moved(x), peer, tag)
