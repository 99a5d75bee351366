"""A trace as Chrome JSON, for ui.perfetto.dev and chrome://tracing.

Each rank is a process with four rows: compute, wait, transfer, post. Layers' operations are nested
in their passes if they were timed. One arrow leads from the last arriver of a collective to each
rank that waited for it, and one from each send to its receive. Perfetto attaches an arrow to the
innermost slices that contain its two timestamps, and draws it from the end of the first to the
start of the second. That is why a short slice in the row `post` ends when the late rank posts, and
the arrow ends where a transfer starts. Times are microseconds with three digits: the nanoseconds of
the trace.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from pathlib import Path

from mpipar.comm.record import BUSY
from mpipar.console import output
from mpipar.trace.trace_file import Trace
from mpipar.trace.waits import Call, Event, Waits

ROWS = ("compute", "wait", "transfer", "post")
MARK_NS = 1000  # length of a slice that only carries an arrow, unless another one is near


def write(trace: Trace, waits: Waits, path: Path) -> int:
    """Write the file and return the number of events; raises OutputError."""
    found = events(trace, waits)
    value = {
        "traceEvents": found,
        "displayTimeUnit": "ms",
        "otherData": {"source": "mpipar", "clock": trace.clock.describe()},
    }
    output.write_text(path, json.dumps(value))
    return len(found)


def events(trace: Trace, waits: Waits) -> list[dict]:
    """Return all events: metadata, slices, arrows."""
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
                found.append(
                    _slice(
                        pid,
                        "compute",
                        name,
                        span.start_ns,
                        span.end_ns,
                        {"step": span.step, "stage": span.stage, "mb": span.mb},
                    )
                )
        found += [
            _slice(
                pid,
                "compute",
                f"{one.layer} {one.function}".strip(),
                one.start_ns,
                one.end_ns,
                {"phase": one.phase, "step": one.step, "stage": one.stage, "mb": one.mb},
            )
            for one in rank.operations
        ]
    for own in waits.calls:
        found += _slices_of_calls(own)
    return found + _arrows(waits)


def _slices_of_calls(calls: list[Call]) -> list[dict]:
    """Return wait and transfer slices of one rank, and marks where a call lacks a slice for an
    arrow.
    """
    found, marks, starts = [], [], []
    for call in calls:
        record, facts = call.record, _facts(call)
        start, end = record.waited_ns, record.done_ns
        split = start + call.wait_ns
        if split > start:
            found.append(
                _slice(
                    call.rank,
                    "wait",
                    record.name,
                    start,
                    split,
                    {**facts, "waits for rank": call.late},
                )
            )
        if end > split:
            found.append(_slice(call.rank, "transfer", record.name, split, end, facts))
            starts.append(split)
        elif record.operation != "send":
            marks.append((end, call, facts))
    starts = sorted([*starts, *(time for time, *_ in marks)])
    for time, call, facts in marks:
        following = bisect_right(starts, time)
        limit = starts[following] - time if following < len(starts) else MARK_NS
        name = f"{call.record.operation} {call.record.name}"
        found.append(_slice(call.rank, "transfer", name, time, time + min(limit, MARK_NS), facts))
    return found


def _arrows(waits: Waits) -> list[dict]:
    """Return all arrows: the slices in which they begin, and their two ends.

    An arrow's id is a number, because Perfetto reads only the hexadecimal digits of a text id, and
    drops arrows with any other.
    """
    found, posts, number = [], {}, 0
    for event in waits.events:
        source, targets = _ends(event)
        # Between hosts, a clock error must not make an arrow end before it starts.
        time = min([source.record.posted_ns, *map(_arrival, targets)])
        if targets:
            posts.setdefault(source.rank, []).append((time, source, targets))
    for rank, own in posts.items():
        own.sort(key=lambda post: post[0])
        before = last = own[0][0] - MARK_NS
        for time, source, targets in own:
            if time > last:
                before, last = last, time
            start, record = max(before, time - MARK_NS), source.record
            found.append(
                _slice(
                    rank, "post", f"{record.operation} {record.name}", start, time, _facts(source)
                )
            )
            for target in targets:
                number += 1
                ends = {"id": number, "name": record.name, "cat": record.axis}
                found.append(
                    {"ph": "s", "pid": rank, "tid": ROWS.index("post"), "ts": start / 1000, **ends}
                )
                found.append(
                    {
                        "ph": "f",
                        "pid": target.rank,
                        "tid": ROWS.index("transfer"),
                        "ts": _arrival(target) / 1000,
                        "bp": "e",
                        **ends,
                    }
                )
    return found


def _ends(event: Event) -> tuple[Call, list[Call]]:
    """Return where arrows begin and end: last arriver and all that waited, or send and receive."""
    if event.operation == "message":
        return event.calls[0], event.calls[1:]
    last = next(call for call in event.calls if call.rank == event.last)
    return last, [call for call in event.calls if call.wait_ns]


def _arrival(call: Call) -> int:
    """Return where an arrow ends: when the wait is over, or when a call that never waits is done.

    A slice of the row `transfer` starts there.
    """
    record = call.record
    return record.waited_ns + call.wait_ns if call.blocked_ns else record.done_ns


def _facts(call: Call) -> dict:
    record = call.record
    facts = {
        "axis": record.axis,
        "operation": record.operation,
        "bytes": record.payload_bytes,
        "sent": record.wire_bytes,
        "wait us": call.wait_ns / 1000,
        "transfer us": call.transfer_ns / 1000,
        "source": record.source,
        "step": record.step,
        "stage": record.stage,
        "mb": record.mb,
        "phase": record.phase,
    }
    if call.event is not None:
        facts["ranks"] = ",".join(map(str, call.event.ranks))
        facts["last"] = call.event.last
    return facts


def _slice(pid: int, row: str, name: str, start: int, end: int, facts: dict) -> dict:
    return {
        "ph": "X",
        "pid": pid,
        "tid": ROWS.index(row),
        "name": name,
        "cat": row,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": facts,
    }


def _meta(kind: str, pid: int, tid: int | None = None, **facts) -> dict:
    return {
        "ph": "M",
        "pid": pid,
        "name": kind,
        "args": facts,
        **({} if tid is None else {"tid": tid}),
    }
