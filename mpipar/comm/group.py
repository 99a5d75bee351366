"""The wire: each barrier and message of a step is a call of a `Comm`.

There is one `Comm` per group; `groups.py` makes them. Each call has a `name=`, under which a reader
finds the barrier in tables and traces, and appends one record. In a group of one it does nothing,
so no layer ever asks how many ranks there are. An all-reduce works in place on the array that it is
given. How bytes travel is up to the transport (`mpipar/comm/groups.py`). Arrays must be
C-contiguous, because memory is sent as it lies; any other is refused before anything is sent.

Every member of the group must make the same collective calls in the same order. A send needs a recv
of the peer with the same tag, and vice versa. If one member skips or reorders a call, the job
hangs, or some ranks get a wrong sum without any error.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe
from time import perf_counter_ns
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mpipar.comm.collective_check import CollectiveCheck
from mpipar.comm.recorder import (
    NO_ENTRY,
    NO_TALLY,
    WAITED,
    Entry,
    Recorder,
    Tally,
    as_record,
    close,
)
from mpipar.comm.transport import Counts, Exchanged, Request, SelfTransport, Transport
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Shape

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

IN_ORDER = SimpleNamespace(c_contiguous=True)
NOTHING: Any = SimpleNamespace(dtype="", flags=IN_ORDER)  # what a barrier sends


class Pending:
    """A posted operation. Do not touch `array` before `wait`, or before `test` returns true.

    request: None once it is done.
    """

    __slots__ = ("array", "entry", "request")

    def __init__(self, request: Request, entry: Entry, array: Array):
        self.request: Request | None = request
        self.entry = entry
        self.array = array
        entry[WAITED] = 0  # no rank waits for it yet

    def test(self) -> bool:
        """Let the operation progress; when it is done, record that and return true."""
        if self.request is None:
            return True
        if not self.request.Test():
            return False
        self.request = None
        self.entry[WAITED] = perf_counter_ns()  # this rank did not have to wait for it
        return close(self.entry, True)

    def wait(self) -> Array:
        """Block until done and return the array."""
        if self.request is not None:
            self.entry[WAITED] = perf_counter_ns()
            close(self.entry, self.request.Wait())
            self.request = None
        return self.array

    Test, Wait = test, wait  # so that it serves as a Request, too


class Comm:
    """One group of ranks along `axis`: their world ranks, and this `group_rank`.

    transport: None for a rank that is alone.
    check: compares a collective over the group before it is made (--check-comm), or None.
    """

    def __init__(
        self,
        axis: str,
        ranks: tuple[int, ...],
        group_rank: int,
        transport: Transport | None,
        recorder: Recorder,
        check: CollectiveCheck | None = None,
    ):
        self.axis, self.ranks, self.group_rank, self.size = axis, ranks, group_rank, len(ranks)
        self.transport = transport or SelfTransport()
        self.recorder, self.check = recorder, check
        self.collectives = self.messages = 0  # calls so far; every member has made as many of these
        self._newest: dict[tuple[str, str, str], Tally] = {}  # by phase, operation and name
        self._drain: Callable[[], None] | None = None
        if self.size > 1 and self.transport.ops.device == "cuda":
            self._drain = self.transport.ops.synchronize

    def _open(
        self, operation: str, name: str, x: Array, payload: int, peer: int = -1, tag: int = -1
    ) -> Entry:
        """Append the entry of an operation to the record, and return it, before the operation.

        First drains the stream that produced the array, because MPI does not wait for a device.

        Finding a line number takes longer than all the rest. Most calls of a barrier come from the
        line of the previous call, so that line's tally is tried first.
        """
        if self.size == 1:
            return NO_ENTRY
        if not x.flags.c_contiguous:
            raise ValueError(
                f"{operation} {name}: an array of shape {tuple(x.shape)} and strides"
                f" {tuple(getattr(x, 'strides', ()))} is not C-contiguous, and memory is sent as it"
                " lies: make it so with np.ascontiguousarray"
            )
        if self._drain is not None:
            self._drain()
        recorder, frame = self.recorder, _getframe(2)
        call = recorder.phase, operation, name
        tally = self._newest.get(call, NO_TALLY)
        if (
            tally.instruction != frame.f_lasti
            or tally.code is not frame.f_code
            or tally.dtype != x.dtype
            or (tally.depth and tally.is_elsewhere(frame))
        ):
            tally = self._newest[call] = recorder.tally(
                self.axis, self.size, x.dtype, operation, name, frame
            )
        if tally.payload != payload:
            tally.resize(payload)
        tally.calls += 1
        if tag < 0:
            self.collectives = seq = self.collectives + 1
        else:
            self.messages = seq = self.messages + 1
        now, where = perf_counter_ns(), (recorder.step, recorder.stage, recorder.mb)
        entry = [now, now, 0, seq, peer, tag, payload, tally.sent, *where, tally]
        recorder.entries.append(entry)
        if self.check is not None and tag < 0:
            self.check(as_record(entry))
        return entry

    def all_reduce(self, x: Array, name: str, op: str = "sum") -> Array:
        """Reduce x over the group in place (op: sum or max) and return it.

        There is no maximum of unsigned numbers: see `mpipar/run/process/self_test.py`.
        """
        if op == "max" and x.dtype.kind == "u":
            raise ValueError(
                f"all_reduce {name}: the largest of {x.dtype} numbers is wrong with widespread MPI"
                " libraries, which take them for signed; view them as a signed type, or convert"
            )
        entry = self._open("all_reduce", name, x, x.nbytes)
        self.transport.all_reduce(x, op)
        return close(entry, x)

    def iall_reduce(self, x: Array, name: str) -> Pending:
        """Post an in-place sum of x over the group; x is done after `wait`."""
        entry = self._open("all_reduce", name, x, x.nbytes)
        return Pending(self.transport.iall_reduce(x), entry, x)

    def all_gather(self, x: Array, name: str) -> Array:
        """Return all ranks' x, stacked in group order: (...) -> (size, ...)."""
        entry = self._open("all_gather", name, x, x.nbytes * self.size)
        return close(entry, self.transport.all_gather(x, self.size))

    def reduce_scatter(self, x: Array, name: str) -> Array:
        """Sum x (size, ...) over the group and return this rank's part: -> (...)."""
        assert x.shape[0] == self.size, (x.shape, self.size)
        entry = self._open("reduce_scatter", name, x, x.nbytes)
        return close(entry, self.transport.reduce_scatter(x))

    def ireduce_scatter(self, x: Array, name: str) -> Pending:
        """Post the sum of x (size, ...) over the group, of which each rank gets its part.

        It needs no further memory: after `wait` this rank's part of the sum is in x[0], and the
        rest of x is undefined.
        """
        assert x.shape[0] == self.size, (x.shape, self.size)
        entry = self._open("reduce_scatter", name, x, x.nbytes)
        return Pending(self.transport.ireduce_scatter(x), entry, x)

    def iall_gather(self, x: Array, name: str) -> Pending:
        """Post an all-gather into x (size, ...), of which x[group_rank] is this rank's part.

        After `wait` the other parts are those of the other ranks.
        """
        assert x.shape[0] == self.size, (x.shape, self.size)
        entry = self._open("all_gather", name, x, x.nbytes)
        return Pending(self.transport.iall_gather(x), entry, x)

    def all_to_all(self, x: Array, name: str) -> Array:
        """Send part j of x (size, ...) to rank j; return the parts that the others sent here."""
        assert x.shape[0] == self.size, (x.shape, self.size)
        entry = self._open("all_to_all", name, x, x.nbytes)
        return close(entry, self.transport.all_to_all(x))

    def all_to_allv(
        self, x: Array, counts: Counts, name: str, received: Counts | None = None
    ) -> Exchanged:
        """Send rows of x (rows, ...) to each rank; return (what arrived, rows from each rank).

        The first counts[0] rows go to rank 0, the next counts[1] to rank 1, and so on; what arrives
        is in the same order. received: the rows from each rank, where they are already known, as on
        the way back of an exchange, whose counts are reversed.
        Comm: an all-to-all of counts unless `received` is given, and one of the rows.
        """
        assert (len(counts), sum(counts)) == (self.size, x.shape[0]), (counts, self.size, x.shape)
        payload = x[: x.shape[0] - counts[self.group_rank]].nbytes  # of rows for others
        entry = self._open("all_to_allv", name, x, payload)
        return close(entry, self.transport.all_to_allv(x, counts, received))

    def broadcast(self, x: Array, root: int, name: str) -> Array:
        """Overwrite x with the root's x (root: a group rank) and return it."""
        entry = self._open("broadcast", name, x, x.nbytes, root)
        self.transport.broadcast(x, root)
        return close(entry, x)

    def reduce(self, x: Array, root: int, name: str) -> Array | None:
        """Sum x over the group on `root` (a group rank), in place; None elsewhere."""
        entry = self._open("reduce", name, x, x.nbytes, root)
        self.transport.reduce(x, root)
        return close(entry, x if self.group_rank == root else None)

    def barrier(self, name: str) -> None:
        """Return when every member has called it."""
        entry = self._open("barrier", name, NOTHING, 0)
        self.transport.barrier()
        close(entry, None)

    def isend(self, x: Array, peer: int, tag: int, name: str) -> Pending:
        """Post a send of x to `peer` (a group rank); x must not be written until done."""
        entry = self._open("send", name, x, x.nbytes, peer, tag)
        return Pending(self.transport.isend(x, peer, tag), entry, x)

    def irecv(self, x: Array, peer: int, tag: int, name: str) -> Pending:
        """Post a receive into x from `peer`; x is valid after `wait`."""
        entry = self._open("recv", name, x, x.nbytes, peer, tag)
        return Pending(self.transport.irecv(x, peer, tag), entry, x)

    def send(self, x: Array, peer: int, tag: int, name: str) -> None:
        """Send x and wait until it is on its way."""
        entry = self._open("send", name, x, x.nbytes, peer, tag)
        self.transport.isend(x, peer, tag).Wait()
        close(entry, None)

    def recv(self, x: Array, peer: int, tag: int, name: str) -> Array:
        """Receive into x and return it."""
        entry = self._open("recv", name, x, x.nbytes, peer, tag)
        self.transport.irecv(x, peer, tag).Wait()
        return close(entry, x)

    def zeros(self, ops: Ops, shape: Shape, dtype: DTypeLike, label: str) -> Array:
        """Return a new array of zeros, in the memory that is best for the group's sums.

        Do not use it after `close`. Comm: perhaps a window, by every member.
        """
        if self.size == 1:
            return ops.zeros(shape, dtype, label=label)
        return self.transport.zeros(shape, dtype, label)

    def neighbor(self, steps: int) -> int:
        """Return the group rank `steps` further around the ring of the group's members."""
        return (self.group_rank + steps) % self.size

    def max_tag(self) -> int:
        """Return the largest message tag that this group's transport can carry."""
        return self.transport.max_tag()

    def close(self) -> None:
        """Free what the check and the transport hold. Comm: every member, in the same order."""
        if self.check is not None:
            self.check.close()
        self.transport.close()
