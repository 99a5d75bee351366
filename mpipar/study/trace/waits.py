"""Wait states: which rank arrived last at every operation of a trace, who waited, and how long.

A collective can end when its last member has arrived, so a member's blocked time has two parts:

    wait     = last arrival - own arrival      another rank was late
    transfer = done - last arrival             the data travels (or no rank lets MPI progress)

Both are limited to the blocked time itself. A member arrives when it posts the operation. It is
blocked from then on, or from its own wait() if the operation is non-blocking. Ranks wait only for
the root of a broadcast, and only the root of a reduce waits. In a message, a *late sender* makes
the receiver wait until the send is posted. A *late receiver* makes the sender wait until the
receive is posted, unless a buffered send completed before that. Source: the wait states of
Scalasca's pattern reference.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpipar.comm.record import POINT_TO_POINT, Record
from mpipar.run.trace.trace_file import Trace


@dataclass(slots=True)
class Call:
    """One rank's part in an operation. It is blocked from record.waited_ns to record.done_ns.

    needs: the calls that must be posted before it can end. wait_ns: time until the last of them is.
    late: the world rank it waited for, or -1.
    """

    rank: int
    record: Record
    event: Event | None = None
    needs: Sequence[Call] = ()
    wait_ns: int = 0
    late: int = -1

    @property
    def blocked_ns(self) -> int:
        return self.record.done_ns - self.record.waited_ns

    @property
    def transfer_ns(self) -> int:
        return self.blocked_ns - self.wait_ns

    def belong(self, event: Event, needs: Sequence[Call], last: Call) -> None:
        """Make the call a part of an event. last: the one of its needs that is posted last.

        Its wait ends there, limited to the time that the call was blocked.
        """
        self.event, self.needs = event, needs
        until_ns = min(last.record.posted_ns, self.record.done_ns) if needs else 0
        self.wait_ns = max(0, until_ns - self.record.waited_ns)
        self.late = last.rank if self.wait_ns else -1


@dataclass(slots=True)
class Event:
    """One operation with all its calls. last: the world rank that arrived last.

    ranks: the whole group; for a message (sender, receiver).
    """

    axis: str
    ranks: tuple[int, ...]
    calls: list[Call]
    last: int = -1

    @property
    def name(self) -> str:
        return self.calls[0].record.name

    @property
    def operation(self) -> str:
        """all_reduce, ..., or "message"."""
        operation = self.calls[0].record.operation
        return "message" if operation in POINT_TO_POINT else operation

    @property
    def arrival_ns(self) -> int:
        """When the last rank arrived."""
        return max(call.record.posted_ns for call in self.calls)


@dataclass
class Waits:
    """All events of a trace, calls by rank in the order of posting, and calls without a partner."""

    events: list[Event]
    calls: list[list[Call]]
    unmatched: list[Call] = field(default_factory=list)


def find(trace: Trace) -> Waits:
    """Match the records of all ranks and set every call's wait.

    Collectives match by group and order, because each member makes the same calls. Messages match
    by group, tag, sender, receiver and order. A call without a partner in the trace counts as
    transfer only.
    """
    waits = Waits(
        [], [[Call(one.world_rank, record) for record in one.records] for one in trace.ranks]
    )
    matching: dict[tuple, list[Call]] = defaultdict(list)
    for rank, own in zip(trace.ranks, waits.calls, strict=True):
        counts: Counter = Counter()
        for call in own:
            record, ranks = call.record, rank.groups[call.record.axis]
            key = record.axis, ranks, "step", record.step
            if record.operation in POINT_TO_POINT:
                ends = rank.world_rank, ranks[record.peer]
                ends = ends if record.operation == "send" else ends[::-1]
                key = record.axis, ends, "tag", record.tag
            counts[key] += 1
            matching[*key, counts[key]].append(call)
    for (axis, ranks, *_), calls in matching.items():
        message = calls[0].record.operation in POINT_TO_POINT
        kinds = set() if message else {(call.record.operation, call.record.name) for call in calls}
        if len(calls) < len(ranks) or len(kinds) > 1:
            waits.unmatched += calls
        else:
            waits.events.append((_message if message else _collective)(axis, ranks, calls))
    waits.events.sort(key=lambda event: event.arrival_ns)
    return waits


def _collective(axis: str, group: tuple[int, ...], members: list[Call]) -> Event:
    operation, root = members[0].record.operation, group[members[0].record.peer]
    awaited = [call for call in members if operation != "broadcast" or call.rank == root]
    last = max(awaited, key=lambda call: call.record.posted_ns)
    event = Event(axis, group, members, last.rank)
    for call in members:
        call.belong(event, () if operation == "reduce" and call.rank != root else awaited, last)
    return event


def _message(axis: str, ends: tuple[int, int], sides: list[Call]) -> Event:
    send, recv = sorted(sides, key=lambda call: call.record.operation == "recv")
    buffered = send.record.done_ns < recv.record.posted_ns
    event = Event(axis, ends, [send, recv])
    recv.belong(event, [send], send)
    send.belong(event, () if buffered else [recv], recv)
    event.last = ends[0] if recv.wait_ns else ends[1] if send.wait_ns else -1
    return event


@dataclass(slots=True)
class Sum:
    """The sum of several calls. last: how often each rank made others wait. sites: of calls."""

    calls: int = 0
    payload: int = 0
    wait_ns: int = 0
    transfer_ns: int = 0
    last: Counter = field(default_factory=Counter)
    sites: Counter = field(default_factory=Counter)


def totals(waits: Waits, key) -> dict:
    """Return {key(call): Sum} over all calls, those with the most waiting and transfer first.

    `last` counts an event once for each key with a call that waited in it.
    """
    sums: dict = defaultdict(Sum)
    for call in itertools.chain.from_iterable(waits.calls):
        entry = sums[key(call)]
        entry.calls += 1
        entry.payload += call.record.payload_bytes
        entry.wait_ns += call.wait_ns
        entry.transfer_ns += call.transfer_ns
        entry.sites[call.record.site] += 1
    for event in waits.events:
        for one in {key(call) for call in event.calls if call.wait_ns}:
            sums[one].last[event.last] += 1
    return dict(sorted(sums.items(), key=lambda item: -(item[1].wait_ns + item[1].transfer_ns)))
