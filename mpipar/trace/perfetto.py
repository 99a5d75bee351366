"""A trace as Chrome JSON, for ui.perfetto.dev and chrome://tracing.

Each rank is a process with three rows: compute, wait, transfer. Layers' operations lie below their
passes where they were timed. One arrow leads from the last arriver of a collective to each rank
that waited for it, and one from each send to its receive. Viewers join an arrow to the slice that
holds its timestamp. So both ends get a slice, a short one if there is no other.
Times are microseconds with three digits: the nanoseconds of the trace.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from pathlib import Path

from mpipar.comm.record import BUSY, POINT_TO_POINT
from mpipar.console import output
from mpipar.trace.trace_file import Trace
from mpipar.trace.waits import Call, Event, Waits

ROWS = ("compute", "wait", "transfer")
MARK_NS = 1000  # length of a slice that only carries an arrow, unless something follows sooner


def write(trace: Trace, waits: Waits, path: Path) -> int:
    """Write the file and return the number of events; raises OutputError."""
    found = events(trace, waits)
    value = {"traceEvents": found, "displayTimeUnit": "ms",
             "otherData": {"source": "mpipar", "clock": trace.clock.describe()}}
    output.write_text(path, json.dumps(value))
    return len(found)


def events(trace: Trace, waits: Waits) -> list[dict]:
    """All events: metadata, slices, arrows."""
    found = []
    for rank in trace.ranks:
        pid = rank.world_rank
        name = f"rank {pid} - {trace.place(rank)} - {rank.host}"
        found.append(_meta("process_name", pid, name=name))
        found.append(_meta("process_sort_index", pid, sort_index=pid))
        for row, name in enumerate(ROWS):
            found.append(_meta("thread_name", pid, row, name=name))
            found.append(_meta("thread_sort_index", pid, row, sort_index=row))
        for span in rank.spans:
            if span.kind in BUSY:
                name = f"{span.stage}{span.kind}{span.mb}" if span.mb >= 0 else span.kind
                found.append(_slice(pid, "compute", name, span.start_ns, span.end_ns, {
                    "step": span.step, "stage": span.stage, "mb": span.mb}))
        found += [_slice(pid, "compute", f"{one.layer} {one.function}".strip(), one.start_ns,
                         one.end_ns, {"phase": one.phase, "step": one.step, "stage": one.stage,
                                      "mb": one.mb}) for one in rank.operations]
    for own in waits.calls:
        found += _slices_of_calls(own)
    arrows = [(event, *ends) for event in waits.events for ends in _arrows(event)]
    for number, arrow in enumerate(arrows, 1):
        found += _ends(number, *arrow)
    return found


def _slices_of_calls(calls: list[Call]) -> list[dict]:
    """Wait and transfer slices of one rank, and marks where a call has no slice for an arrow."""
    found, marks, starts = [], [], []
    for call in calls:
        record, facts = call.record, _facts(call)
        start, end = record.waited_ns, record.done_ns
        split = start + call.wait_ns
        if split > start:
            found.append(_slice(call.rank, "wait", record.name, start, split,
                                {**facts, "waits for rank": call.late}))
        if end > split:
            found.append(_slice(call.rank, "transfer", record.name, split, end, facts))
            starts.append(split)
        marks += [(time, call, facts) for _, time, is_mark in (post_of(call), end_of(call))
                  if is_mark]
    starts = sorted([*starts, *(time for time, *_ in marks)])
    for time, call, facts in marks:
        following = bisect_right(starts, time)
        limit = starts[following] - time if following < len(starts) else MARK_NS
        name = f"{call.record.operation} {call.record.name}"
        found.append(_slice(call.rank, "transfer", name, time, time + min(limit, MARK_NS), facts))
    return found


def post_of(call: Call) -> tuple[str, int, bool]:
    """Where arrows leave a call: (row, time, whether a mark is needed there)."""
    record = call.record
    if not call.blocked_ns or record.posted_ns < record.waited_ns:
        return "transfer", record.posted_ns, True
    return "wait" if call.wait_ns else "transfer", record.posted_ns, False


def end_of(call: Call) -> tuple[str, int, bool]:
    """Where arrows arrive at a call: at the end of its waiting."""
    record = call.record
    if call.wait_ns:
        return "wait", record.waited_ns + call.wait_ns - 1, False
    if call.blocked_ns:
        return "transfer", record.waited_ns, False
    return "transfer", record.done_ns, True


def _arrows(event: Event) -> list[tuple[Call, Call]]:
    """Arrows from the last arriver to every rank that waited, or from a send to its receive."""
    if event.calls[0].record.operation in POINT_TO_POINT:
        return [(event.calls[0], event.calls[1])]
    last = next(call for call in event.calls if call.rank == event.last)
    return [(last, call) for call in event.calls if call.wait_ns]


def _ends(number: int, event: Event, source: Call, target: Call) -> list[dict]:
    """Both ends of an arrow. Its id is a number.

    From a text id Perfetto reads only hexadecimal digits, and drops arrows with any other.
    """
    return [{"ph": phase, "id": number, "name": event.name, "cat": event.axis, "pid": call.rank,
             "tid": ROWS.index(row), "ts": time / 1000, **({"bp": "e"} if phase == "f" else {})}
            for phase, call, (row, time, _) in (("s", source, post_of(source)),
                                                ("f", target, end_of(target)))]


def _facts(call: Call) -> dict:
    record = call.record
    facts = {"axis": record.axis, "operation": record.operation, "bytes": record.payload_bytes,
             "sent": record.wire_bytes, "wait us": call.wait_ns / 1000,
             "transfer us": call.transfer_ns / 1000, "source": record.source, "step": record.step,
             "stage": record.stage, "mb": record.mb, "phase": record.phase}
    if call.event is not None:
        facts["ranks"] = ",".join(map(str, call.event.ranks))
        facts["last"] = call.event.last
    return facts


def _slice(pid: int, row: str, name: str, start: int, end: int, facts: dict) -> dict:
    return {"ph": "X", "pid": pid, "tid": ROWS.index(row), "name": name, "cat": row,
            "ts": start / 1000, "dur": (end - start) / 1000, "args": facts}


def _meta(kind: str, pid: int, tid: int | None = None, **facts) -> dict:
    return {"ph": "M", "pid": pid, "name": kind, "args": facts,
            **({} if tid is None else {"tid": tid})}
