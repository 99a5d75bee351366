"""Links of a traced run that are slow: beside the axis's others, or beside a gigabit cable."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from statistics import median

from mpipar.comm.record import COMPUTE, POINT_TO_POINT
from mpipar.trace.segments import Segment
from mpipar.trace.trace_file import Trace
from mpipar.trace.waits import Event, Waits

SLOW_LINK = 2.0  # times as long per byte as the axis's other links
LARGE_SHARE = 0.05  # of the traced time, for a link to matter
CABLE_NS_PER_BYTE = 10  # a gigabit cable, with what a protocol costs
CABLE_NS = 0.5e6  # a message's own delay on a bad network
CROWDED = 30  # times as patient where a rank may not have a core when data comes
AFTER_NS = 1e6  # what has started to move when the sender was free again ends within this time


@dataclass
class Link:
    """The transfers of one link: from a sender to a receiver, or inside a group."""

    axis: str
    ranks: tuple[int, ...]
    message: bool
    times: list[int] = field(default_factory=list)
    payload: int = 0

    @property
    def time(self) -> float:
        """Nanoseconds of all transfers; a few long ones do not count."""
        return median(self.times) * len(self.times)

    @property
    def size(self) -> float:
        return self.payload / len(self.times)

    def text(self) -> str:
        """Which link, what it carried, how long it took."""
        ranks = (" -> " if self.message else ", ").join(map(str, self.ranks))
        rate = self.payload / max(self.time, 1) * 1e3
        return (f"{self.axis} {'link' if self.message else 'group'} {ranks}: {len(self.times)}"
                f" transfers of {self.size / 1024:.1f} KiB take {median(self.times) * 1e-6:.2f} ms"
                f" each ({rate:.0f} MB/s)")


def slow_links(trace: Trace, waits: Waits, segments: list[list[Segment]]) -> list[tuple]:
    """[(text, nanoseconds)] of the links whose transfers take too long."""
    links = measured(waits, segments)
    crowded = bool(trace.crowded())
    found = []
    for link in links:
        if link.time < LARGE_SHARE * (trace.end - trace.start):
            continue
        others = [one.time / one.payload for one in links
                  if one is not link and (one.axis, one.message) == (link.axis, link.message)]
        pace, usual = link.time / link.payload, median(others) if others else 0.0
        # Where a rank may have to wait for a core, even quick transfers must be slow.
        typical = sorted(link.times)[len(link.times) // (8 if crowded else 2)]
        least = CABLE_NS * (CROWDED if crowded else 1)
        if others and pace > SLOW_LINK * usual and typical > least:
            told = f"{pace / max(usual, 1e-9):.1f}x as long per byte as the axis's others"
        elif typical > least + CABLE_NS_PER_BYTE * link.size:
            told = "longer than over a gigabit cable"
        else:
            continue
        found.append((f"{link.text()}, {told}", link.time))
    return found


def measured(waits: Waits, segments: list[list[Segment]]) -> list[Link]:
    """Every link with its transfers, without those that stood still while the sender computed."""
    links: dict[tuple, Link] = {}
    for event in waits.events:
        payload = event.calls[0].record.payload_bytes
        message = event.calls[0].record.operation in POINT_TO_POINT
        # The first member that leaves a collective shows how long the data travelled.
        slow = event.calls[1].transfer_ns if message else min(
            call.transfer_ns for call in event.calls)
        if not payload or (message and _stood_still(event, slow, segments[event.ranks[0]])):
            continue
        link = links.setdefault((event.axis, event.ranks, message),
                                Link(event.axis, event.ranks, message))
        link.times.append(slow)
        link.payload += payload
    return list(links.values())


def _stood_still(event: Event, slow: int, sender: list[Segment]) -> bool:
    """Whether a message moved only when its sender had finished a pass and called MPI again.

    MPI moves nothing until it is called. That says nothing about the link.
    """
    end = event.calls[1].record.done_ns
    first = bisect_right(sender, end - slow, key=lambda one: one.end)
    last = bisect_left(sender, end, key=lambda one: one.start)
    computing = [one for one in sender[first:last] if one.kind in COMPUTE]
    return bool(computing) and 0 <= end - computing[-1].end < AFTER_NS and (
        computing[-1].end - max(computing[-1].start, end - slow) > slow / 2)
