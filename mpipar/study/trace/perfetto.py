"""A trace as Chrome JSON, for ui.perfetto.dev and chrome://tracing.

Each rank is a process with four rows: compute, wait, transfer, post. Layers' operations are nested
in their passes if they were timed. An arrow leads from the rank that came last to each rank that
waited for it. Perfetto attaches an arrow to the innermost slices that contain its two timestamps,
and draws it from the end of the first to the start of the second. That is why a short slice in the
row `post` ends when the late rank posts; the arrow ends there, where the wait becomes a transfer.
Times are microseconds with three digits: the nanoseconds of the trace.
"""

import itertools
import json
from pathlib import Path

from mpipar.comm.record import BUSY
from mpipar.run.console import output
from mpipar.run.trace.trace_file import Trace
from mpipar.study.trace.waits import Call, Waits

ROWS = ("compute", "wait", "transfer", "post")
MARK_NS = 1000  # length of a slice that only carries arrows, unless another one is near


def write(trace: Trace, waits: Waits, path: Path) -> None:
    """Write the file. Raises OutputError."""
    output.write_text(path, json.dumps({"traceEvents": events(trace, waits)}))


def events(trace: Trace, waits: Waits) -> list[dict]:
    """Return all events: metadata, slices, arrows."""
    found = []
    for rank in trace.ranks:
        pid = rank.world_rank
        name = f"rank {pid} - {trace.place(rank)} - {rank.host}"
        found += [
            _meta("process_name", pid, name=name),
            _meta("process_sort_index", pid, sort_index=pid),
            *(_meta("thread_name", pid, row, name=name) for row, name in enumerate(ROWS)),
            *(_meta("thread_sort_index", pid, row, sort_index=row) for row in range(len(ROWS))),
        ]
        for one in rank.spans:
            if one.kind in BUSY:
                name = f"{one.stage}{one.kind}{one.mb}" if one.mb >= 0 else one.kind
                found.append(_computing(pid, name, one))
        for one in rank.timed_operations():
            name = f"{one.layer} {one.function}".strip()
            found.append(_computing(pid, name, one, phase=one.phase))
    for call in itertools.chain.from_iterable(waits.calls):
        found += _slices_of_call(call)
    return found + _arrows(waits)


def _computing(pid: int, name: str, one, **facts) -> dict:
    known = {"step": one.step, "stage": one.stage, "mb": one.mb}
    return _slice(pid, "compute", name, one.start_ns, one.end_ns, known | facts)


def _slices_of_call(call: Call) -> list[dict]:
    """Return a call's slices in the rows wait and transfer, as far as it was blocked."""
    record, facts = call.record, _facts(call)
    start, end = record.waited_ns, record.done_ns
    split = start + call.wait_ns
    late = facts | {"waits for rank": call.late}
    pieces = (("wait", start, split, late), ("transfer", split, end, facts))
    return [
        _slice(call.rank, row, record.name, low, high, more)
        for row, low, high, more in pieces
        if high > low
    ]


def _arrows(waits: Waits) -> list[dict]:
    """Return all arrows: the slices in which they begin, and their two ends.

    An arrow's id is a number, because Perfetto reads only the hexadecimal digits of a text id, and
    drops arrows with any other. The ends of an arrow are one moment: when the last rank came.
    """
    posts = []
    for event in waits.events:
        if waiting := [call for call in event.calls if call.wait_ns and call.transfer_ns]:
            source = next(call for call in event.calls if call.rank == event.last)
            posts.append((source.record.posted_ns, source, waiting))
    found, numbers = [], itertools.count(1)
    starts: dict[int, int] = {}  # by rank: of the slice of its last post
    ends: dict[int, int] = {}
    for end, source, waiting in sorted(posts, key=lambda post: post[0]):
        rank, record = source.rank, source.record
        if end > ends.get(rank, -1):  # posts of one moment have the same slice
            starts[rank] = max(ends.get(rank, end - MARK_NS), end - MARK_NS)
            ends[rank] = end
        name = f"{record.operation} {record.name}"
        found.append(_slice(rank, "post", name, starts[rank], end, _facts(source)))
        for target in waiting:
            arrow = {"id": next(numbers), "name": record.name, "cat": record.axis}
            found.append(arrow | _end("s", rank, "post", starts[rank]))
            found.append(arrow | _end("f", target.rank, "transfer", end) | {"bp": "e"})
    return found


def _end(phase: str, pid: int, row: str, time: int) -> dict:
    return {"ph": phase, "pid": pid, "tid": ROWS.index(row), "ts": time / 1000}


def _facts(call: Call) -> dict:
    record = call.record
    return {
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
