"""The script of a rank: what it sends, waits for and computes in one step, in order.

The real Worker takes its step on shapes while this module listens. A posted operation counts as
unfinished until the step waits for it, so the script knows where a rank would wait.
"""

from __future__ import annotations

from bisect import bisect_left
from time import perf_counter_ns
from typing import Any, NamedTuple

from mpipar.comm.record import Record, Recorder
from mpipar.comm.request import Array, Request
from mpipar.comm.transport import Counts, Exchanged, ShapesTransport
from mpipar.config.sections import Config
from mpipar.data import rows
from mpipar.study.explain.predict import worker_on_shapes

CALL, WAIT, LOOK, SPAN = "call", "wait", "look", "span"


class Call(NamedTuple):
    """An operation of a `Comm`. shape: of the array that it is given.

    posted: whether the rank continues, and waits later. looked: whether it meanwhile tests if the
    operation is done. argument: the `op` of an all_reduce; the counts of an all_to_allv, those sent
    and those received.
    """

    record: Record
    shape: tuple[int, ...]
    posted: bool
    looked: bool
    argument: Any

    @property
    def itemsize(self) -> int:
        """Bytes of an element of what travels."""
        return int(getattr(self.record.dtype, "itemsize", 1))


class Event(NamedTuple):
    """One point of a step. flops: what the rank computes since the previous event.

    action: CALL begins the call of this number, and WAIT waits for it. SPAN ends the pass of this
    number. LOOK lets all posted operations progress.
    """

    flops: int
    action: str
    number: int


class Pass(NamedTuple):
    """A stretch of computing. kind, stage, mb: see `record.Span`. first: the event it begins at."""

    kind: str
    stage: int
    mb: int
    first: int


class Script(NamedTuple):
    """One training step of one rank. groups: {axis: world ranks}."""

    world_rank: int
    calls: tuple[Call, ...]
    events: tuple[Event, ...]
    passes: tuple[Pass, ...]
    groups: dict[str, tuple[int, ...]]
    num_params: int


class Notes(Recorder):
    """A recorder that also notes when each operation begins and is waited for."""

    def __init__(self) -> None:
        super().__init__(None)
        self.events: list[Event] = []
        self.passes: list[Pass] = []
        self.instants: list[int] = []  # of the events
        self.given: list[tuple[Any, ...]] = []  # what each call gets: see `Call`
        self.looked: set[int] = set()
        self.ops: Any = None
        self.computed = 0

    def note(self, action: str, number: int) -> None:
        """Append an event."""
        computed = sum(self.ops.flops.values())
        self.events.append(Event(computed - self.computed, action, number))
        self.instants.append(perf_counter_ns())
        self.computed = computed

    def call(self, shape: tuple[int, ...], posted: bool = False, argument: Any = None) -> int:
        """Note an operation, whose record is the newest; return its number."""
        self.given.append((shape, posted, argument))
        self.note(CALL, len(self.given) - 1)
        return len(self.given) - 1

    def look(self, number: int) -> None:
        """Note that the step tests whether a call is done."""
        self.looked.add(number)
        if self.events[-1].action != LOOK or sum(self.ops.flops.values()) != self.computed:
            self.note(LOOK, -1)

    def span(self, kind: str, start: Any, stage: int = -1, mb: int = -1, end: Any = None) -> None:
        """Note the end of a pass."""
        super().span(kind, start, stage, mb, end)
        self.passes.append(Pass(kind, stage, mb, bisect_left(self.instants, start)))
        self.note(SPAN, len(self.passes) - 1)


class Noted:
    """The request of an operation that completes when it is waited for, not earlier."""

    def __init__(self, notes: Notes, number: int):
        self.notes, self.number = notes, number

    def Test(self) -> bool:
        self.notes.look(self.number)
        return False

    def Wait(self) -> None:
        self.notes.note(WAIT, self.number)


class Listening(ShapesTransport):
    """A transport that sends nothing and notes each call."""

    def __init__(self, ops: Any, notes: Notes):
        super().__init__(ops)
        self.notes = notes

    def _posted(self, x: Array, *_: Any) -> Request:
        return Noted(self.notes, self.notes.call(x.shape, posted=True))

    iall_reduce = iall_gather = ireduce_scatter = isend = irecv = _posted

    def _blocking(self, x: Array, *_: Any) -> None:
        self.notes.call(x.shape)

    broadcast = reduce = _blocking

    def all_reduce(self, x: Array, op: str) -> None:
        self.notes.call(x.shape, argument=op)

    def barrier(self) -> None:
        self.notes.call(())

    def all_gather(self, x: Array, group_size: int) -> Array:
        self.notes.call(x.shape)
        return super().all_gather(x, group_size)

    def reduce_scatter(self, x: Array) -> Array:
        self.notes.call(x.shape)
        return super().reduce_scatter(x)

    def all_to_all(self, x: Array) -> Array:
        self.notes.call(x.shape)
        return super().all_to_all(x)

    def all_to_allv(self, x: Array, counts: Counts, received: Counts | None) -> Exchanged:
        self.notes.call(x.shape, argument=(counts, received))
        return super().all_to_allv(x, counts, received)


def script_of(config: Config, world_rank: int) -> Script:
    """Return the script of a rank in the layout of a resolved config."""
    notes = Notes()
    worker = worker_on_shapes(config, world_rank, notes)
    notes.ops = worker.ops
    for comm in worker.comms.groups.values():
        if comm.size > 1:
            comm.transport = Listening(worker.ops, notes)
    blank_batch = rows.blank_batch
    worker.train_step(1, lambda mb: blank_batch(worker.ops, config))
    calls = [
        Call(record, shape, posted, number in notes.looked, argument)
        for number, (record, (shape, posted, argument)) in enumerate(
            zip(notes.records, notes.given, strict=True)
        )
    ]
    return Script(
        world_rank,
        tuple(calls),
        tuple(notes.events),
        tuple(notes.passes),
        {axis: comm.ranks for axis, comm in worker.comms.groups.items()},
        sum(flat.size for flat in worker.flats),
    )
