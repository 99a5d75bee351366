"""The wire: the only module that moves data between ranks.

There is one `Comm` per group. Each call has a `name=`: the barrier that a reader finds in tables
and traces. Each call appends one record. In a group of one it does nothing, so no layer ever asks
how many ranks there are. Reductions work in place on the array they are given. How bytes travel is
the transport's business (`mpipar/comm/connect.py`).

Every member of the group must make the same collective calls in the same order. A send needs a recv
of the peer with the same tag, and the reverse. If one member skips or reorders a call, the job
hangs, or some ranks get a wrong sum without any error.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from sys import _getframe
from time import perf_counter_ns

from mpipar.comm.checked import CallCheck
from mpipar.comm.connect import Options, connect, split
from mpipar.comm.grid import AXES, Grid
from mpipar.comm.hosts import cores_of, finish_passes_first
from mpipar.comm.record import (
    DONE,
    NO_TALLY,
    POINT_TO_POINT,
    TALLY,
    WAITED,
    Recorder,
    as_record,
    close,
)


class Pending:
    """A posted operation. Do not touch `array` before `wait`, or before `test` returns true.

    request: None once it is done, and in a group of one.
    """

    __slots__ = ("array", "entry", "request")

    def __init__(self, request, entry, array):
        self.request = request
        self.entry = entry
        self.array = array

    def test(self) -> bool:
        """Let the operation progress; when it is done, record that and return true."""
        if self.request is None:
            return True
        if not self.request.Test():
            return False
        self.entry[WAITED] = perf_counter_ns()  # nobody had to wait for it
        close(self.entry)
        self.request = None
        return True

    def wait(self):
        """Block until done and return the array."""
        if self.request is not None:
            self.entry[WAITED] = perf_counter_ns()
            self.request.Wait()
            close(self.entry)
            self.request = None
        return self.array


class Comm:
    """One group of ranks along `axis`: their world ranks, and this rank's place `index`.

    wire: its transport; None for a rank that is alone.
    check: compares a collective over the group before it is made (--check-comm), or None.
    """

    def __init__(self, axis: str, ranks: tuple[int, ...], index: int, wire, recorder, check=None):
        self.axis = axis
        self.ranks = ranks
        self.index = index
        self.size = len(ranks)
        self.wire = wire
        self.recorder = recorder
        self.check = check
        self.seq = 0
        self._newest: dict = defaultdict(dict)  # {operation: {name: tally of its newest call}}
        on_device = wire is not None and wire.ops.device == "cuda"
        self._drain = wire.ops.synchronize if on_device else None

    def _open(self, operation, name, payload, dtype, peer=-1, tag=-1, posted=0):
        """What comes before an operation: append its entry to the record, and return it.

        It first drains the stream that made the array, because MPI does not wait for a device.
        posted: when a send began whose message has gone already.

        To find a line number takes longer than all the rest. Most calls of a barrier come from the
        line of the call before, so that one's tally is tried first.
        """
        if self._drain is not None and not posted:
            self._drain()
        recorder, frame, newest = self.recorder, _getframe(2), self._newest[operation]
        tally = newest.get(name, NO_TALLY)
        if (tally.instruction != frame.f_lasti or tally.code is not frame.f_code
                or tally.payload_bytes != payload or tally.dtype is not dtype
                or tally.phase is not recorder.phase
                or (tally.depth and tally.is_elsewhere(frame))):
            tally = newest[name] = recorder.tally(
                self.axis, self.size, dtype, operation, name, payload, frame)
        tally.calls += 1
        self.seq = seq = self.seq + 1
        now = posted or perf_counter_ns()
        entry = [now, now, 0, seq, peer, tag, recorder.step, recorder.stage, recorder.mb, tally]
        recorder.entries.append(entry)
        if self.check is not None and operation not in POINT_TO_POINT:
            self.check(as_record(entry))
        return entry

    def all_reduce(self, x, name: str, op: str = "sum"):
        """Reduce x over the group in place (op: sum or max) and return it."""
        if self.size > 1:
            entry = self._open("all_reduce", name, x.nbytes, x.dtype)
            self.wire.all_reduce(x, op)
            close(entry)
        return x

    def iall_reduce(self, x, name: str) -> Pending:
        """Post an in-place sum of x over the group; x is done after `wait`."""
        if self.size == 1:
            return Pending(None, None, x)
        entry = self._open("all_reduce", name, x.nbytes, x.dtype)
        entry[WAITED] = 0  # posted, and nobody waits for it yet
        return Pending(self.wire.iall_reduce(x), entry, x)

    def all_gather(self, x, name: str):
        """Everybody's x, stacked in group order: (...) -> (size, ...)."""
        if self.size == 1:
            return x.reshape(1, *x.shape)
        entry = self._open("all_gather", name, x.nbytes * self.size, x.dtype)
        y = self.wire.all_gather(x, self.size)
        close(entry)
        return y

    def reduce_scatter(self, x, name: str):
        """Sum x (size, ...) over the group and keep this rank's part: -> (...)."""
        assert x.shape[0] == self.size, (x.shape, self.size)
        if self.size == 1:
            return x.reshape(x.shape[1:])
        entry = self._open("reduce_scatter", name, x.nbytes, x.dtype)
        y = self.wire.reduce_scatter(x)
        close(entry)
        return y

    def ireduce_scatter(self, x, name: str) -> Pending:
        """Post the sum of x (size, ...) over the group, of which each rank gets its part.

        No other memory is needed: after `wait` this rank's part of the sum is in x[0], and the rest
        of x means nothing.
        """
        assert x.shape[0] == self.size, (x.shape, self.size)
        if self.size == 1:
            return Pending(None, None, x)
        entry = self._open("reduce_scatter", name, x.nbytes, x.dtype)
        entry[WAITED] = 0  # posted, and nobody waits for it yet
        return Pending(self.wire.ireduce_scatter(x), entry, x)

    def iall_gather(self, x, name: str) -> Pending:
        """Post an all-gather into x (size, ...): x[index] is this rank's part, and after `wait`
        the other parts are those of the others.
        """
        assert x.shape[0] == self.size, (x.shape, self.size)
        if self.size == 1:
            return Pending(None, None, x)
        entry = self._open("all_gather", name, x.nbytes, x.dtype)
        entry[WAITED] = 0  # posted, and nobody waits for it yet
        return Pending(self.wire.iall_gather(x), entry, x)

    def all_to_all(self, x, name: str):
        """Send part j of x (size, ...) to rank j; returns what the others sent here, in the same
        shape.
        """
        assert x.shape[0] == self.size, (x.shape, self.size)
        if self.size == 1:
            return x
        entry = self._open("all_to_all", name, x.nbytes, x.dtype)
        y = self.wire.all_to_all(x)
        close(entry)
        return y

    def broadcast(self, x, root: int, name: str):
        """Overwrite x with the root's x (root: place in the group) and return it."""
        if self.size > 1:
            entry = self._open("broadcast", name, x.nbytes, x.dtype, peer=root)
            self.wire.broadcast(x, root)
            close(entry)
        return x

    def reduce(self, x, root: int, name: str):
        """Sum x over the group on `root` (place in the group), in place; None elsewhere."""
        if self.size > 1:
            entry = self._open("reduce", name, x.nbytes, x.dtype, peer=root)
            self.wire.reduce(x, root)
            close(entry)
        return x if self.index == root else None

    def barrier(self, name: str) -> None:
        """Return when every member has called."""
        if self.size > 1:
            entry = self._open("barrier", name, 0, "")
            self.wire.barrier()
            close(entry)

    def isend(self, x, peer: int, tag: int, name: str) -> Pending:
        """Post a send of x to `peer` (place in the group); x must not be written until done."""
        entry = self._open("send", name, x.nbytes, x.dtype, peer, tag)
        entry[WAITED] = 0  # posted, and nobody waits for it yet
        return Pending(self.wire.isend(x, peer, tag), entry, x)

    def irecv(self, x, peer: int, tag: int, name: str) -> Pending:
        """Post a receive into x from `peer`; x is valid after `wait`."""
        entry = self._open("recv", name, x.nbytes, x.dtype, peer, tag)
        entry[WAITED] = 0  # posted, and nobody waits for it yet
        return Pending(self.wire.irecv(x, peer, tag), entry, x)

    def send(self, x, peer: int, tag: int, name: str) -> None:
        """Send x and wait until it is on its way.

        The receiver waits for this call, so its entry is written behind the message. Whoever reads
        the record before finds the call by its frame: `open_sends`.
        """
        if self._drain is not None:
            self._drain()
        posted = perf_counter_ns()
        self.wire.send(x, peer, tag)
        done = perf_counter_ns()
        entry = self._open("send", name, x.nbytes, x.dtype, peer, tag, posted)
        entry[DONE] = done
        entry[TALLY].nanoseconds += done - posted

    def recv(self, x, peer: int, tag: int, name: str):
        """Receive into x and return it. The end is that of `close`, without one more call."""
        entry = self._open("recv", name, x.nbytes, x.dtype, peer, tag)
        self.wire.recv(x, peer, tag)
        entry[DONE] = done = perf_counter_ns()
        entry[TALLY].nanoseconds += done - entry[WAITED]
        return x

    def neighbor(self, steps: int) -> int:
        """The place `steps` further round the ring of the group's members."""
        return (self.index + steps) % self.size

    def max_tag(self) -> int:
        """The largest message tag that this group's transport can carry."""
        return self.wire.max_tag()

    def close(self) -> None:
        """Free what the transport and the check hold. Comm: every member, in the same order."""
        for held in (self.check, self.wire):
            if held is not None:
                held.close()


class Comms:
    """All groups of one rank: `world`, one per axis, and further ones by name.

    `alone` is the group of this rank and no other. `partitions` maps a name (e.g. "tie", "mirror")
    to the world ranks of *every* such group. All ranks take part in making them. A rank that is in
    none of them is alone.
    Comm: one communicator split per group when `mpi_world` is given; none for the shapes-only run.
    """

    def __init__(self, grid, ops, recorder, mpi_world=None, options=None, partitions=None):
        self.grid, self.recorder, self.mpi_world = grid, recorder, mpi_world
        options = options or Options()
        crowded = cores_of(mpi_world).crowded
        options = options._replace(patient=crowded)
        if crowded:
            finish_passes_first()

        def make(axis, ranks, alone=False):
            """My group's Comm. alone: no group on this axis has several ranks, so there is no
            split.
            """
            wire = check = None
            if not alone:
                stages = {replace(grid, world_rank=member).pp_rank for member in ranks}
                wire = connect(ops, mpi_world, ranks, options._replace(uneven=len(stages) > 1))
                if options.check and mpi_world is not None:
                    check = CallCheck(split(mpi_world, ranks), ranks)
            return Comm(axis, ranks, ranks.index(grid.world_rank), wire, recorder, check)

        self.world = make("world", tuple(range(grid.world_size)), grid.world_size == 1)
        self.by_axis = {
            axis: make(axis, grid.group(axis), grid.axis_size(axis) == 1) for axis in AXES}
        self.pp, self.dp, self.cp, self.tp = (self.by_axis[axis] for axis in AXES)
        # The ranks that hold the same shard and read other tokens: those of dp x cp.
        self.data = self.dp
        self.alone = Comm("alone", (grid.world_rank,), 0, None, recorder)
        if grid.cp_size > 1:
            self.data = self.by_axis["data"] = make("data", grid.group("dp", "cp"))
        for name, groups in (partitions or {}).items():
            mine = next((ranks for ranks in groups if grid.world_rank in ranks),
                        (grid.world_rank,))
            self.by_axis[name] = make(name, mine, all(len(ranks) == 1 for ranks in groups))
        self.groups = {"world": self.world, **self.by_axis}

    @classmethod
    def solo(cls, ops, grid=None, recorder=None) -> Comms:
        """The groups of one rank of `grid` (default: of one rank) without MPI: nothing is sent."""
        return cls(grid or Grid(0), ops, recorder or Recorder())

    def close(self) -> None:
        """Free the communicators, because MPI has only some two thousand.

        Comm: every rank, in the same order.
        """
        for comm in self.groups.values():
            comm.close()
