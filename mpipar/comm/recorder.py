"""The recorder: notes every barrier and every compute span of a rank while it runs.

It knows neither MPI nor other hosts' clocks. An operation's entry is opened when the operation is
posted and closed when it is done, so a record whose `done_ns` is 0 is the operation that this rank
is currently in. Entries are kept in a ring of the newest ones. The counters beside the ring never
overflow, and the tables of a run come from them. Readers get the values of `record.py`. Who waited
for whom follows from the traces of all ranks: `study/trace/waits.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any, TypeAlias, TypeVar

from mpipar.comm.record import NO_SUMS, Key, Record, Span, Sums, line_of, wire_bytes

# Modules that cross barriers for a layer, or for a group.
BELOW_SITE = ("mpipar.layers.parallel", "mpipar.comm.algorithms", "mpipar.comm.group")
# An entry is a list that belongs to one operation; `Record` says what its parts mean. It must cost
# next to nothing, so whatever the calls of one line have in common is in its last part, the tally.
# Only this file and group.py know these positions. Readers get a Record.
(POSTED, WAITED, DONE, SEQ, PEER, TAG, PAYLOAD, WIRE, STEP, STAGE, MB, TALLY) = range(12)
Entry: TypeAlias = list[Any]
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Tally:
    """What the calls of one line have in common, and their sums over calls of any size.

    code, instruction: the caller's place in its function.
    depth: the number of frames from there to the site, whose code and instruction follow.
    payload, sent: bytes of each call since `before`. nanoseconds: of the calls that are done.
    """

    operation: str = ""
    name: str = ""
    axis: str = ""
    group_size: int = 1
    dtype: object = None
    phase: str = ""
    code: CodeType | None = None
    instruction: int = -1
    depth: int = 0
    site_code: CodeType | None = None
    site_instruction: int = -1
    payload: int = 0
    sent: int = 0
    calls: int = 0
    nanoseconds: int = 0
    before: Sums = NO_SUMS
    found: tuple[str, str] | None = None

    def is_elsewhere(self, frame: FrameType) -> bool:
        """Return whether this caller has a different site."""
        site: FrameType | None = frame
        for _ in range(self.depth):
            site = site and site.f_back
        return (
            site is None
            or self.site_code is not site.f_code
            or self.site_instruction != site.f_lasti
        )

    def lines(self) -> tuple[str, str]:
        """Return site and cut as file:line, for a Record; they are found when first asked for."""
        if self.found is None:
            cut = line_of(self.code, self.instruction) if self.depth else ""
            self.found = line_of(self.site_code, self.site_instruction), cut
        return self.found

    def sums(self) -> Sums:
        """Return the sums over all calls."""
        calls = self.calls - self.before.calls
        return Sums(
            self.calls,
            self.before.payload_bytes + calls * self.payload,
            self.before.wire_bytes + calls * self.sent,
            self.nanoseconds,
        )

    def resize(self, payload: int) -> None:
        """Change the payload of further calls. Most lines have only one, so this is rare."""
        self.before, self.payload = self.sums(), payload
        self.sent = wire_bytes(self.operation, payload, self.group_size)


NO_TALLY = Tally()  # of no call
NO_ENTRY: Entry = [0] * TALLY + [Tally()]  # of every call in a group of one: never read


def site_of(frame: FrameType) -> tuple[int, FrameType]:
    """Return the site beyond the cuts for a caller `frame` of a group: (frames out, its frame)."""
    site, depth = frame, 0
    while site.f_globals.get("__name__", "").startswith(BELOW_SITE) and site.f_back is not None:
        site, depth = site.f_back, depth + 1
    return depth, site


def as_record(entry: Entry) -> Record:
    """Return the Record of an entry. Other threads may call it, even while MPI is in its call."""
    tally = entry[TALLY]
    return Record._make(
        (
            *entry[:SEQ],
            tally.operation,
            tally.name,
            tally.axis,
            *entry[SEQ:STEP],
            tally.dtype,
            *entry[STEP:TALLY],
            tally.phase,
            *tally.lines(),
        )
    )


def close(entry: Entry, result: Result) -> Result:
    """Mark the entry's operation as done now, add its time, and return its result."""
    entry[DONE] = now = perf_counter_ns()
    entry[TALLY].nanoseconds += now - entry[WAITED]
    return result


class At:
    """A rank's place in a step, until the block ends. See `Recorder.at`.

    After an error the place stays as it was, because the error's report says where it happened.
    """

    __slots__ = ("before", "mb", "phase", "recorder", "stage")

    def __init__(self, recorder: Recorder, phase: str, stage: int | None, mb: int | None):
        self.recorder, self.phase, self.stage, self.mb = recorder, phase, stage, mb

    def __enter__(self) -> None:
        recorder = self.recorder
        self.before = recorder.phase, recorder.stage, recorder.mb
        recorder.phase = self.phase
        if self.stage is not None:
            recorder.stage = self.stage
        if self.mb is not None:
            recorder.mb = self.mb

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.recorder.phase, self.recorder.stage, self.recorder.mb = self.before


class Recorder:
    """Collects what one rank did: `records` of communication, `spans` of compute, and counters.

    The training loop sets `step`. Code that may communicate runs inside of `at`, the only function
    that changes phase, stage and mb. phase is F, I, W (compute of a schedule), recompute, sync
    (gradients, norm), opt, check (of copies), eval or save. It begins as setup. `operations` holds
    one entry for each operation of a layer, if the ops are wrapped for it (ops/timed_ops.py).
    """

    def __init__(self, capacity: int | None = 4096, phase: str = "setup"):
        self.entries: deque[Entry] = deque(maxlen=capacity)
        self._spans: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        # Spans between marks on a device.
        self._late: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        self.operations: list[tuple[Any, ...]] = []
        self.tallies: dict[tuple[Any, ...], Tally] = {}  # by what distinguishes lines of calls
        self.busy_ns: dict[str, int] = {}
        self.step = 0
        self.stage = -1
        self.mb = -1
        self.phase = phase

    def at(self, phase: str, stage: int | None = None, mb: int | None = None) -> At:
        """Return a context with this phase, and with this stage and microbatch if given."""
        return At(self, phase, stage, mb)

    @property
    def records(self) -> list[Record]:
        """The records in the ring, oldest first. Other threads may read them."""
        return [as_record(entry) for entry in list(self.entries)]

    @property
    def spans(self) -> list[Span]:
        """The compute spans in the ring, oldest first. Other threads may read them."""
        return [Span._make(span) for span in list(self._spans)]

    def newest(self) -> tuple[Any, ...]:
        """Return fields of the newest record and span, which change with every event."""
        record = as_record(self.entries[-1]) if self.entries else ()
        return record, self._spans[-1] if self._spans else ()

    def resize(self, capacity: int | None) -> None:
        """Give all rings room for `capacity` entries (None: for all). The newest ones are kept."""
        self.entries = deque(self.entries, maxlen=capacity)
        self._spans = deque(self._spans, maxlen=capacity)
        self._late = deque(self._late, maxlen=capacity)

    def reset_counters(self) -> None:
        """Restart the counters from zero (the rings stay)."""
        for tally in self.tallies.values():
            tally.calls, tally.nanoseconds, tally.before = 0, 0, NO_SUMS
        self.busy_ns = {}

    def clear(self) -> None:
        """Empty all rings and restart the counters from zero."""
        for ring in (self.entries, self._spans, self._late):
            ring.clear()
        self.reset_counters()

    @property
    def counters(self) -> dict[Key, Sums]:
        """The counters, which include what has already left the ring."""
        counters: dict[Key, Sums] = {}
        for tally in list(self.tallies.values()):
            if tally.calls:
                key = Key(tally.axis, tally.name, tally.operation, tally.phase, str(tally.dtype))
                counters[key] = counters.get(key, Sums()).plus(tally.sums())
        return counters

    def tally(
        self, axis: str, group_size: int, dtype: object, operation: str, name: str, frame: FrameType
    ) -> Tally:
        """Return the tally of a call from this frame; a new one for a line that had none."""
        depth, site = site_of(frame)
        places = frame.f_code, frame.f_lasti, depth, site.f_code, site.f_lasti
        line = operation, name, axis, group_size, dtype, self.phase, *places
        return self.tallies.setdefault(line, Tally(*line))

    def span(self, kind: str, start: Any, stage: int = -1, mb: int = -1, end: Any = None) -> None:
        """Append a compute span from `start` to `end` (default: now).

        Both are ns, or marks on a device (`ops.timestamp`): then `settle` appends the span.
        """
        span = kind, start, perf_counter_ns() if end is None else end, self.step, stage, mb
        if type(start) is int:
            self._append(span)
        else:
            self._late.append(span)

    def _append(self, span: tuple[Any, ...]) -> None:
        kind, start_ns, end_ns, *_ = span
        self._spans.append(span)
        self.busy_ns[kind] = self.busy_ns.get(kind, 0) + end_ns - start_ns

    def settle(self, nanoseconds: Callable[[list[Any]], list[int]]) -> None:
        """Append the spans between marks on a device, once it has passed them.

        nanoseconds(marks): see `ops.nanoseconds`.
        """
        late = list(self._late)
        self._late.clear()
        times = iter(nanoseconds([mark for span in late for mark in span[1:3]]) if late else ())
        for kind, _, _, *where in late:
            self._append((kind, next(times), next(times), *where))

    def totals(self, *fields: str) -> dict[tuple[str, ...], Sums]:
        """Return the counters summed over everything except these fields of a Key."""
        sums: dict[tuple[str, ...], Sums] = {}
        for key, counter in self.counters.items():
            short = tuple(getattr(key, field) for field in fields)
            sums[short] = sums.get(short, Sums()).plus(counter)
        return sums
