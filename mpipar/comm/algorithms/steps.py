"""Algorithms of our own, written as steps: generators that yield the requests they wait for.

The same code serves a blocking call, which waits for each step, and a posted one, which continues
whenever it is tested: between layers, in `Pending.test`.

No step relies on buffers inside MPI: a rank that sends has posted its receive. All ranks wait for
posted sums in the order in which they posted them, so a rank that computes meanwhile, and makes no
progress, only delays the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mpipar.comm.grid import chunk_slice
from mpipar.comm.mpi import MpiTransport, PollingRequest
from mpipar.comm.transport import New, Options, Request
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array

if TYPE_CHECKING:
    from mpi4py import MPI


Steps: TypeAlias = Iterator[Request]
TAGS = 1 << 14  # operations that may be pending at once; MPI has at least twice as many tags


class Posted:
    """A request that runs through the steps of an operation.

    before: pending operations of the same kind, in order. Where a step is a collective, all ranks
    must post it in the same order, so an operation waits for those before it.
    """

    def __init__(self, steps: Steps, before: deque[Posted] | None = None):
        self.steps, self.before = steps, before
        self.now = next(steps, None)
        if before is not None:
            before.append(self)

    def _first(self, wait: bool) -> bool:
        """Return whether the operations before it are done. wait: wait for them."""
        while self.before and self.before[0] is not self and self in self.before:
            first = self.before[0]
            if wait:
                first.Wait()
            elif not first.Test():
                return False
        return True

    def Test(self) -> bool:
        if self.now is None:
            return True
        if not self._first(wait=False):
            return False
        while self.now is not None:
            if not self.now.Test():
                return False
            self._step()
        return True

    def Wait(self) -> None:
        if self.now is not None:
            self._first(wait=True)
        while self.now is not None:
            self.now.Wait()
            self._step()

    def _step(self) -> None:
        self.now = next(self.steps, None)
        if self.now is None and self.before:
            self.before.popleft()


class Messages:
    """Several messages, handled as one request."""

    def __init__(self, requests: list[MPI.Request]):
        from mpi4py import MPI

        self.requests, self.kind = requests, MPI.Request

    def Test(self) -> bool:
        return bool(self.kind.Testall(self.requests))

    def Wait(self) -> None:
        self.kind.Waitall(self.requests)


class StepwiseTransport(MpiTransport):
    """Base class of the algorithms that exchange messages, on a communicator of their own.

    Each implements `summed`; maxima, reduce-scatters and all-gathers are MPI's own.
    Comm: one Dup of the group.
    """

    def __init__(self, ops: Ops, mpi_comm: MPI.Comm, options: Options, new: New | None = None):
        super().__init__(ops, mpi_comm, options, new)
        self.own = mpi_comm.Dup()
        self.size, self.group_rank = mpi_comm.size, mpi_comm.rank
        self.number = 0  # of the operation, from which its messages get their tag
        self.before: deque[Posted] | None = None

    def summed(self, x: Array) -> Steps:
        """Leave the sum of all ranks' x (n,) in x."""
        raise AssertionError("each algorithm has its own steps")

    def all_reduce(self, x: Array, op: str) -> None:
        if op == "sum":
            self.iall_reduce(x).Wait()
        else:
            super().all_reduce(x, op)

    def iall_reduce(self, x: Array) -> Request:
        return Posted(self.summed(in_line(x)), self.before)

    def next_tag(self) -> int:
        """Return the tag of a new operation; all ranks start operations in the same order."""
        self.number += 1
        return self.number % TAGS

    def exchange(self, tag: int, sent: Array, to: int, received: Array, source: int) -> Request:
        """Post a receive, then a send."""
        return self.messages([self.own.Irecv(received, source, tag), self._send(sent, to, tag)])

    def send(self, tag: int, x: Array, to: int) -> Request:
        return self.messages([self._send(x, to, tag)])

    def receive(self, tag: int, x: Array, source: int) -> Request:
        return self.messages([self.own.Irecv(x, source, tag)])

    def _send(self, x: Array, to: int, tag: int) -> MPI.Request:
        return (self.own.Issend if self.options.sync_sends else self.own.Isend)(x, to, tag)

    def messages(self, requests: list[MPI.Request]) -> Request:
        """Return these as one request; a rank that yields its core sleeps between two polls."""
        messages = Messages(requests)
        return PollingRequest(messages) if self.options.yields_cpu else messages

    def pieces(self, x: Array) -> list[Array]:
        """Return x (n,) as one piece per rank; the last ones may be shorter or empty."""
        return [x[chunk_slice(len(x), self.size, one)] for one in range(self.size)]

    def close(self) -> None:
        self.own.Free()
        super().close()


def in_line(x: Array) -> Array:
    """Return the same memory as an array (n,)."""
    assert x.flags.c_contiguous, (x.shape, x.strides)
    return x.reshape(-1)


@np.errstate(over="ignore", invalid="ignore")
def add(x: Array, y: Array, into: Array) -> None:
    """Write x + y, in host memory. As in MPI, numbers that overflow cause no warning."""
    np.add(x, y, out=into)


class RingTransport(StepwiseTransport):
    """Each rank sends to the next one and receives from the one before.

    The sum of a piece grows as it travels around the ring. After size - 1 hops every rank has the
    whole sum of one piece, which then goes around once more. Each rank sends 2 (size - 1) / size of
    the array, the minimum, in 2 (size - 1) messages. Source: Patarasu and Yuan, doi
    10.1016/j.jpdc.2008.09.002.
    """

    def hop(self, tag: int, sent: Array, received: Array) -> Request:
        """Pass a piece on and receive the next one."""
        return self.exchange(
            tag,
            sent,
            (self.group_rank + 1) % self.size,
            received,
            (self.group_rank - 1) % self.size,
        )

    def summed(self, x: Array) -> Steps:
        pieces, tag = self.pieces(x), self.next_tag()
        room = np.empty_like(pieces[0])
        for hop in range(1, self.size):  # afterwards pieces[group_rank] is a whole sum
            sent, grown = (pieces[(self.group_rank - hop - ahead) % self.size] for ahead in (0, 1))
            yield self.hop(tag, sent, room[: len(grown)])
            add(grown, room[: len(grown)], grown)
        for hop in range(self.size - 1):
            sent, new = (pieces[(self.group_rank - hop - ahead) % self.size] for ahead in (0, 1))
            yield self.hop(tag, sent, new)


class RecursiveDoublingTransport(StepwiseTransport):
    """Pairs exchange whole arrays, at distances 1, 2, 4 and so on.

    After log2(size) exchanges every rank has the sum. This is the lowest latency, at the price of
    about log2(size) / 2 times the bytes of a ring. Where the size is not a power of two, each
    surplus rank first hands its numbers to a partner and later gets the sum from it. Both ranks of
    a pair add the same two arrays, so all end with the same bits. Source: Thakur, Rabenseifner and
    Gropp, doi 10.1177/1094342005051521.
    """

    def summed(self, x: Array) -> Steps:
        tag, most = self.next_tag(), 1 << self.size.bit_length() - 1
        surplus = self.size - most
        if self.group_rank >= most:
            partner = self.group_rank - most
            yield self.send(tag, x, partner)
            yield self.receive(tag, x, partner)
            return
        room, distance = np.empty_like(x), 1
        if self.group_rank < surplus:
            yield self.receive(tag, room, self.group_rank + most)
            add(x, room, x)
        while distance < most:
            peer = self.group_rank ^ distance
            yield self.exchange(tag, x, peer, room, peer)
            add(x, room, x)
            distance *= 2
        if self.group_rank < surplus:
            yield self.send(tag, x, self.group_rank + most)


class RabenseifnerTransport(StepwiseTransport):
    """Sums in two of MPI's collectives: a reduce-scatter of pieces, and an all-gather.

    A rank sends as much as with a ring. Each of the two kinds of collectives has its own
    communicator, on which all ranks post them in the same order, that of the operations. Source:
    Rabenseifner, doi 10.1007/978-3-540-24685-5_1.
    Comm: one additional Dup.
    """

    def __init__(self, ops: Ops, mpi_comm: MPI.Comm, options: Options, new: New | None = None):
        super().__init__(ops, mpi_comm, options, new)
        self.gathers = mpi_comm.Dup()
        self.before = deque()

    def summed(self, x: Array) -> Steps:
        pieces = self.pieces(x)
        counts, own = [len(one) for one in pieces], np.empty_like(pieces[self.group_rank])
        yield self.own.Ireduce_scatter(x, own, counts)
        pieces[self.group_rank][:] = own
        yield self.gathers.Iallgatherv(self.in_place, [x, counts])

    def close(self) -> None:
        self.gathers.Free()
        super().close()
