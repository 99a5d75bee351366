"""Slow links of a traced run: compared with the axis's others, and with a gigabit cable."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from statistics import median

from mpipar.comm.record import COMPUTE
from mpipar.run.trace.trace_file import Trace
from mpipar.study.trace.pop import replay
from mpipar.study.trace.segments import Segment
from mpipar.study.trace.waits import Call, Event, Waits

LEAST_LENGTHS = 3  # transfers that show the travel time of data; fewer may be chance
SLOW_LINK = 2.0  # times as long per byte as the axis's other links
LARGE_SHARE = 0.05  # of the traced time, for a link to matter
CABLE_NS_PER_BYTE = 10  # a gigabit cable, with what a protocol costs
CABLE_NS = 0.5e6  # a message's own delay on a bad network
AFTER_NS = 1e6  # a transfer that starts when its sender is free again ends within this time


@dataclass
class Link:
    """The transfers of one link: from a sender to a receiver, or inside a group.

    lengths: nanoseconds that the data travelled, where a rank waited for half of that; sizes: the
    bytes of these. free: when the last of them had arrived.
    """

    axis: str
    ranks: tuple[int, ...]
    message: bool
    events: list[Event] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    free: int = 0

    @property
    def length(self) -> float:
        """Typical travel time of data in nanoseconds; a few long transfers have no influence."""
        return median(self.lengths)

    @property
    def quick(self) -> float:
        """Nanoseconds of its quick transfers: on a slow link these are slow too."""
        return sorted(self.lengths)[len(self.lengths) // 8]

    @property
    def size(self) -> float:
        """Typical bytes of a transfer, among those whose length is known."""
        return median(self.sizes)

    def text(self) -> str:
        """Return which link, what it carried, and how long it took."""
        ranks = (" -> " if self.message else ", ").join(map(str, self.ranks))
        return (
            f"{self.axis} {'link' if self.message else 'group'} {ranks}: {len(self.events)}"
            f" transfers of {self.size / 1024:.1f} KiB take {self.length * 1e-6:.2f} ms"
            f" each ({self.size / max(self.length, 1) * 1e3:.1f} MB/s)"
        )

    def lost(self, trace: Trace, waits: Waits, usual: float) -> float:
        """Return how many nanoseconds steps would save if even quick transfers were as usual."""
        saved = {
            id(call): min(call.transfer_ns, self.quick - usual)
            for event in self.events
            for call in event.calls
        }
        ends = replay(trace, waits, lambda call: call.transfer_ns - saved.get(id(call), 0))
        return trace.end - max(ends)


def slow_links(trace: Trace, waits: Waits, segments: list[list[Segment]]) -> list[tuple]:
    """Return [(text, nanoseconds lost)] of the links whose transfers take too long."""
    links = [link for link in measured(waits, segments) if len(link.lengths) >= LEAST_LENGTHS]
    found = []
    for link in links:
        others = [
            one.length / one.size
            for one in links
            if one is not link and (one.axis, one.message) == (link.axis, link.message)
        ]
        usual = median(others) * link.size if others else 0.0
        cable = CABLE_NS_PER_BYTE * link.size
        if others and link.quick > max(SLOW_LINK * usual, CABLE_NS):
            times = link.length / max(usual, 1)
            reason = f"{times:.1f}x as long per byte as the axis's others"
        elif link.quick > CABLE_NS + cable:
            usual, reason = cable, "longer than over a gigabit cable"
        else:
            continue
        lost = link.lost(trace, waits, usual)
        share = lost / (trace.end - trace.start)
        if share >= LARGE_SHARE:
            found.append((f"{link.text()}, {reason}: {share:.0%} of the step", lost))
    return found


def measured(waits: Waits, segments: list[list[Segment]]) -> list[Link]:
    """Return every link that carried data, with the transfer times that are known."""
    links: dict[tuple, Link] = {}
    for event in waits.events:
        if not event.calls[0].record.payload_bytes:
            continue
        message = event.operation == "message"
        link = links.setdefault(
            (event.axis, event.ranks, message), Link(event.axis, event.ranks, message)
        )
        sent = event.calls[0].record.posted_ns if message else event.arrival_ns
        first = _first_to_leave(event)
        start, end = max(sent, link.free), first.record.done_ns
        # Data that arrived before any rank waited for it leaves no arrival time.
        seen = 0 < end - start <= 2 * first.transfer_ns
        if seen and not (message and _stood_still(start, end, segments[event.ranks[0]])):
            link.lengths.append(end - start)
            link.sizes.append(event.calls[0].record.payload_bytes)
        link.events.append(event)
        link.free = max(link.free, end)
    return list(links.values())


def _first_to_leave(event: Event) -> Call:
    """Return the receiver of a message; of a collective, the member that shows the travel time."""
    receivers = event.calls[1:] if event.operation == "message" else event.calls
    return min(receivers, key=lambda call: call.record.done_ns)


def _stood_still(start: int, end: int, sender: list[Segment]) -> bool:
    """Return whether a message moved only when its sender had finished a pass and called MPI again.

    MPI moves nothing until it is called, so that says nothing about the link.
    """
    first = bisect_right(sender, start, key=lambda one: one.end)
    last = bisect_left(sender, end, key=lambda one: one.start)
    computing = [one for one in sender[first:last] if one.kind in COMPUTE]
    return (
        bool(computing)
        and 0 <= end - computing[-1].end < AFTER_NS
        and (computing[-1].end - max(computing[-1].start, start) > (end - start) / 2)
    )
