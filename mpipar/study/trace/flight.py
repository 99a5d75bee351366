"""How long posted operations were in flight, and how much of that computing hid."""

from __future__ import annotations

from typing import TypeAlias

from mpipar.comm.record import COMPUTE, Recorder

Intervals: TypeAlias = list[tuple[int, int]]


def flight_ns(recorder: Recorder, axis: str, operations: tuple[str, ...]) -> tuple[int, int]:
    """Return (ns in which any of these operations over `axis` is in flight, ns overlapped).

    Flight lasts from posting to the end. What counts as overlapped: see `overlap_ns`. Blocking
    operations are left out, and only what is in the rings counts.
    """
    records = [record for record in recorder.records if record.done_ns]
    flights = [
        (record.posted_ns, record.done_ns)
        for record in records
        if record.axis == axis
        and record.operation in operations
        and record.posted_ns < record.waited_ns
    ]
    computing = [(span.start_ns, span.end_ns) for span in recorder.spans if span.kind in COMPUTE]
    return overlap_ns(
        flights, computing, [(record.waited_ns, record.done_ns) for record in records]
    )


def overlap_ns(flights: Intervals, computing: Intervals, blocked: Intervals) -> tuple[int, int]:
    """Return (length of the union of `flights`, how much of that is computing and not blocked).

    Each argument: a list of (start, end) in nanoseconds. Time that a rank spends in another wait
    does not count as computing, even inside a pass.
    """
    edges = sorted(
        (time, kind, change)
        for kind, intervals in enumerate((flights, computing, blocked))
        for start, end in intervals
        for time, change in ((start, 1), (end, -1))
    )
    inside, last, flight, hidden = [0, 0, 0], 0, 0, 0
    for time, kind, change in edges:
        if inside[0]:
            flight += time - last
            if inside[1] and not inside[2]:
                hidden += time - last
        inside[kind] += change
        last = time
    return flight, hidden
