"""What two pictures need of a traced run: its median step, that step simulated, and a barrier.

`bench.docs measure` keeps it beside the outputs of its commands, if one of them has traced a run.
The barrier is the collective of that step with the most waiting.
"""

from __future__ import annotations

from pathlib import Path

from mpipar.comm.record import PASSES
from mpipar.pipeline.instructions import parts
from mpipar.trace import pop, waits
from mpipar.trace.timeline import median_step
from mpipar.trace.trace_file import Trace, read


def last_trace(folder: Path) -> dict:
    """{"trace": ...} of the newest traced run below a folder, or nothing."""
    found = sorted(folder.glob("**/trace/meta.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        return {}
    trace = read(found[-1].parent.parent)
    step, _ = median_step(trace)
    rows = [*measured(trace, step), *simulated(trace), *barrier(trace, step)]
    return {"trace": {"layout": trace.layout(), "schedule": trace.meta["schedule"]["name"],
                      "rows": rows}}


def row(what: str, rank: int, kind: str, place: tuple[int, int], times: tuple) -> dict:
    """A pass, or a part of the barrier; times in milliseconds."""
    start, end = (round(float(one), 4) for one in times)
    return {"what": what, "rank": rank, "kind": kind, "stage": place[0], "mb": place[1],
            "start_ms": start, "end_ms": end}


def measured(trace: Trace, step: int) -> list[dict]:
    """The passes of the step on one rank of each pipeline rank; the first one starts at 0."""
    chosen = {rank.place["pp"]: rank for rank in reversed(trace.ranks)}
    spans = [(place, span) for place, rank in sorted(chosen.items()) for span in rank.spans
             if span.step == step and span.kind in PASSES]
    start = min(span.start_ns for _, span in spans)
    return [row("measured", place, span.kind, (span.stage, span.mb),
                ((span.start_ns - start) * 1e-6, (span.end_ns - start) * 1e-6))
            for place, span in spans]


def simulated(trace: Trace) -> list[dict]:
    """The passes as the simulator places them, with the trace's own mean times."""
    return [row("simulated", place, span.instr.kind, parts(span.instr)[0][1:],
                (span.start * 1e3, span.end * 1e3))
            for place, spans in enumerate(pop.simulated(trace).spans) for span in spans
            if span.end > span.start]


def barrier(trace: Trace, step: int) -> list[dict]:
    """Wait and transfer of each rank in the collective with the most waiting of the step."""
    found = [event for event in waits.find(trace).events if len(event.calls) > 1
             and event.operation != "message" and event.calls[0].record.step == step]
    if not found:
        return []
    event = max(found, key=lambda one: sum(call.wait_ns for call in one.calls))
    first = min(call.record.waited_ns for call in event.calls)
    name, rows = f"{event.operation} {event.name}", []
    for call in event.calls:
        came, done = call.record.waited_ns - first, call.record.done_ns - first
        met = came + call.wait_ns
        place = (call.record.stage, call.record.mb)
        rows += [row(f"{what}: {name}", call.rank, call.record.phase, place, times)
                 for what, times in (("wait", (came * 1e-6, met * 1e-6)),
                                     ("transfer", (met * 1e-6, done * 1e-6)))]
    return rows
