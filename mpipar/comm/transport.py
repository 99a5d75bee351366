"""Transports for host memory, and those of a single process, where nothing travels.

Only upper-case mpi4py calls on buffers are used. `mpipar/comm/connect.py` chooses a transport for
each group. Device memory has its own transports (`mpipar/comm/device.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np

from mpipar.comm.algorithms import ALGORITHMS
from mpipar.comm.request import Array, Done, Options, PatientRequest, Request

if TYPE_CHECKING:
    from mpi4py import MPI

Counts: TypeAlias = Sequence[int]  # rows for each rank of a group, or from each
Exchanged: TypeAlias = tuple[Array, Counts]  # what arrived, and the rows from each rank


class Transport(Protocol):
    """How the arrays of one group travel; the docstrings of `Comm` describe each call.

    all_reduce, broadcast, reduce, recv and all posted operations work in place. The others return
    what arrived.

    carrier: what carries the bytes, as text. in_order: whether messages are matched by their order
    alone. If so, both of their ranks must post them in the same order, separately for even and for
    odd tags.
    """

    ops: Any
    carrier: str
    in_order: bool

    def zeros(self, shape: tuple[int, ...], dtype: Any, label: str) -> Array: ...
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
    def send(self, x: Array, peer: int, tag: int) -> Any: ...
    def recv(self, x: Array, peer: int, tag: int) -> Any: ...
    def isend(self, x: Array, peer: int, tag: int) -> Request: ...
    def irecv(self, x: Array, peer: int, tag: int) -> Request: ...
    def max_tag(self) -> int: ...
    def close(self) -> None: ...


class NoTransport:
    """One process and no data: the shapes-only run.

    Receives leave the array, which has no numbers, as it is.
    """

    carrier, in_order = "nobody", False

    def __init__(self, ops: Any = None):
        self.ops = ops

    def _nothing(self, *_: Any) -> None:
        pass

    def _done(self, *_: Any) -> Request:
        return Done()

    def zeros(self, shape: tuple[int, ...], dtype: Any, label: str) -> Array:
        return self.ops.zeros(shape, dtype, label=label)

    all_reduce = broadcast = reduce = barrier = send = recv = close = _nothing
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


class Alone(NoTransport):
    """A group of one: it receives what it sends, and has no peer to send a message to."""

    def _nobody(self, *_: Any) -> Any:
        raise AssertionError("a group of one sends no messages")

    send = recv = isend = irecv = _nobody

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


class HostTransport:
    """Hands arrays straight to MPI."""

    carrier, in_order = "MPI", False

    def __init__(self, ops: Any, mpi_comm: MPI.Intracomm, options: Options):
        from mpi4py import MPI

        self.ops, self.mpi = ops, mpi_comm
        self.travel = ALGORITHMS[options.all_reduce](ops, mpi_comm, options)
        # Synchronous sends return only when matched. A program that works with them never relies on
        # buffers inside MPI, whatever the message size.
        self._send, self._isend = (
            (mpi_comm.Ssend, mpi_comm.Issend)
            if options.sync_sends
            else (mpi_comm.Send, mpi_comm.Isend)
        )
        self.tag_ub: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # Open MPI sets it only there
        self.patient = options.patient
        self.sleeps_before_sums = options.patient and options.uneven

    def _new(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new array to receive into."""
        return self.ops.empty(shape, dtype, label="buffers")

    def zeros(self, shape: tuple[int, ...], dtype: Any, label: str) -> Array:
        return self.travel.zeros(shape, dtype, label)

    def all_reduce(self, x: Array, op: str) -> None:
        """Sum x or take the maximum, in place. A rank that is early sleeps until all are here.

        Measured with 4 ranks on 2 cores, alternating without and with that: steps of gpipe take 13
        % less time, and those of 1f1b 5 %.
        """
        if self.sleeps_before_sums:
            PatientRequest(self.mpi.Ibarrier()).Wait()
        self.travel.all_reduce(x, op)

    def iall_reduce(self, x: Array) -> Request:
        return self.travel.iall_reduce(x)

    def ireduce_scatter(self, x: Array) -> Request:
        return self.travel.ireduce_scatter(x)

    def iall_gather(self, x: Array) -> Request:
        return self.travel.iall_gather(x)

    def all_gather(self, x: Array, group_size: int) -> Array:
        y = self._new((group_size, *x.shape), x.dtype)
        self.travel.all_gather(x, y)
        return y

    def reduce_scatter(self, x: Array) -> Array:
        y = self._new(x.shape[1:], x.dtype)
        self.travel.reduce_scatter(x, y)
        return y

    def all_to_all(self, x: Array) -> Array:
        y = self._new(x.shape, x.dtype)
        self.travel.all_to_all(x, y)
        return y

    def all_to_allv(self, x: Array, counts: Counts, received: Counts | None) -> Exchanged:
        if received is None:
            received = self.counts_from(counts)
        y = self._new((sum(received), *x.shape[1:]), x.dtype)
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
        self.mpi.Reduce(self.travel.in_place if here else x, x if here else None, root=root)

    def barrier(self) -> None:
        self.mpi.Barrier()

    def send(self, x: Array, peer: int, tag: int) -> None:
        self._send(x, peer, tag)

    def recv(self, x: Array, peer: int, tag: int) -> None:
        if self.patient:
            self.irecv(x, peer, tag).Wait()
        else:
            self.mpi.Recv(x, peer, tag)

    def isend(self, x: Array, peer: int, tag: int) -> Request:
        return self._patiently(self._isend(x, peer, tag))

    def irecv(self, x: Array, peer: int, tag: int) -> Request:
        return self._patiently(self.mpi.Irecv(x, peer, tag))

    def _patiently(self, request: Request) -> Request:
        return PatientRequest(request) if self.patient else request

    def max_tag(self) -> int:
        return int(self.tag_ub)

    def close(self) -> None:
        self.travel.close()
        self.mpi.Free()


class DirectTransport(HostTransport):
    """Hands NumPy arrays straight to MPI. `send` and `recv` are MPI's own: a peer waits for it."""

    def __init__(self, ops: Any, mpi_comm: MPI.Intracomm, options: Options):
        super().__init__(ops, mpi_comm, options)
        send, receive = cast(Any, self._send), cast(Any, mpi_comm.Recv)
        self.send = send  # type: ignore[method-assign]
        if not self.patient:
            self.recv = receive  # type: ignore[method-assign]
