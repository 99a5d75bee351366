"""When two ranks last met: the instant from which their work can be compared.

Ranks meet in a collective in which all of its members are blocked at once. Two ranks also meet
where one has waited for the other, as for a message or for the root of a broadcast. A message that
had arrived before anybody asked for it is no meeting.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from mpipar.trace.waits import Event, Waits

ONE_SIDED = ("message", "broadcast", "reduce")  # not every member waits for every other


class Meetings:
    """The meetings of a trace, by the ranks that met."""

    def __init__(self, waits: Waits):
        self.instants: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for event in waits.events:
            for ranks, instant in _of_event(event):
                self.instants[ranks].append(instant)
        self.groups: dict[int, set] = defaultdict(set)
        for ranks, instants in self.instants.items():
            instants.sort()
            for rank in ranks:
                self.groups[rank].add(ranks)

    def last(self, one: int, other: int, before: int, otherwise: int) -> int:
        """When both ranks last met before an instant, or `otherwise`."""
        found = otherwise
        for ranks in self.groups[one] & self.groups[other]:
            instants = self.instants[ranks]
            place = bisect_left(instants, before)
            if place:
                found = max(found, instants[place - 1])
        return found


def _of_event(event: Event) -> list[tuple[tuple[int, ...], int]]:
    """[(ranks that met, when)] of one event."""
    if event.operation in ONE_SIDED:
        return [(tuple(sorted((call.rank, call.late))), call.record.waited_ns + call.wait_ns)
                for call in event.calls if call.wait_ns]
    instant = max(call.record.waited_ns for call in event.calls)
    blocked = instant <= min(call.record.done_ns for call in event.calls)
    return [(tuple(sorted(event.ranks)), instant)] if blocked else []
