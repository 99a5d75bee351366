"""Who waits for whom: what each rank is doing, by its recorder, and the report of a hang."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from time import perf_counter_ns

from mpipar.comm.record import POINT_TO_POINT, place

STEP = ("F", "I", "W", "sync")  # phases in which every communication has a record
INSIDE = ("mpipar/comm/", "mpipar/job/")  # places that communicate for others


def marker(recorder):
    """A value that changes with every operation, span and wait of this rank.

    Outside a training step, for example while weights are read, it also changes with every move.
    """
    where = recorder.step, recorder.phase, recorder.mb
    moves = () if recorder.phase in STEP else position()
    return where, recorder.newest(), moves  # not their number, which stays the same in a full ring


def position() -> tuple:
    """Where the main thread is: any move of it, in any of its functions, changes the value."""
    frame, found = main_frame(), []
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def main_frame():
    """The innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident)


def waiting_record(recorder):
    """The record of the operation that this rank waits in, or None while it computes."""
    for record in reversed(recorder.records):
        if not record.done_ns and record.waited_ns:
            return record
    return None


def state_of(recorder=None, comms=None, where: str = "") -> dict:
    """What this rank is doing, as JSON-able values; called from the watchdog's thread.

    where: says it for a rank without a recorder.
    """
    main = main_frame()
    stack = []
    while main is not None and len(stack) < 12:
        stack.append(place(main.f_code.co_filename, main.f_lineno) + f" in {main.f_code.co_name}")
        main = main.f_back
    if recorder is None:
        return {"at": where or "start", "counted": False, "inside": None, "stack": stack}
    record = waiting_record(recorder)
    inside = None
    if record is not None:
        ranks = comms.groups[record.axis].ranks
        inside = {
            "operation": record.operation, "name": record.name, "axis": record.axis,
            "seq": record.seq, "ranks": list(ranks), "source": record.source,
            "peer": ranks[record.peer] if record.peer >= 0 else None, "stage": record.stage,
            "mb": record.mb, "phase": record.phase,
            "seconds": round((perf_counter_ns() - record.waited_ns) * 1e-9, 1),
        }
    at = (f"step {recorder.step}, phase {recorder.phase}, stage {recorder.stage},"
          f" mb {recorder.mb}")
    return {"at": at, "counted": recorder.phase in STEP, "inside": inside, "stack": stack}


def doing(state: dict | None) -> str:
    """One phrase for what a rank is doing."""
    if state is None:
        return "has written nothing: it works, or its process is stopped or gone"
    inside, at, stack = state["inside"], state["at"], state["stack"]
    if inside is None:
        here = stack[0] if stack else "?"
        if state["counted"]:
            return f"is in no communication ({at}); its main thread is at {here}"
        caller = next((frame for frame in stack if not frame.startswith(INSIDE)), here)
        return f"is at {here}" + (f", called from {caller}" if caller != here else "") + f" ({at})"
    target = f" {'to' if inside['operation'] == 'send' else 'from'} rank {inside['peer']}" \
        if inside["peer"] is not None else ""
    return (f"waits in {inside['operation']} {inside['name']}{target} ({inside['axis']}, {at})"
            f" for {inside['seconds']} s at {inside['source']}")


def explain(states: dict[int, dict], ranks: Iterable[int]) -> list[str]:
    """Lines of a report: incomplete barriers, who is missing from each, and what those ranks do.

    If no rank waits in a barrier, they say what every rank does. ranks: all that could have
    written a state.
    """
    lines, missing_ranks = [], set()
    barriers = defaultdict(list)
    for rank, state in sorted(states.items()):
        inside = state["inside"]
        if inside is None:
            continue
        if inside["operation"] in POINT_TO_POINT:
            lines.append(f"rank {rank} {doing(state)}")
            missing_ranks.add(inside["peer"])
        else:
            key = (inside["axis"], tuple(inside["ranks"]), inside["seq"], inside["operation"],
                   inside["name"])
            barriers[key].append(rank)
    for (axis, ranks, seq, operation, name), arrived in barriers.items():
        missing = [rank for rank in ranks if rank not in arrived]
        missing_ranks |= set(missing)
        lines.append(
            f"barrier {name} ({operation} {seq} of the {axis} group {list(ranks)}) is incomplete:"
            f" {names(arrived)} arrived, {names(missing)} missing")
    lines += [f"late: rank {rank} {doing(states.get(rank))}" for rank in sorted(missing_ranks)
              if rank not in states or states[rank]["inside"] is None]
    circle = find_circle(states)
    if circle:
        lines.append("a circle of ranks that wait for each other: " + " -> ".join(map(str, circle)))
    for rank in sorted(missing_ranks & set(states)):
        lines += [f"  rank {rank}: {frame}" for frame in states[rank]["stack"][:6]]
    return lines or [f"rank {rank} {doing(states.get(rank))}" for rank in sorted({*ranks, *states})]


def names(ranks) -> str:
    """Ranks as text."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def find_circle(states: dict[int, dict]) -> list[int]:
    """Ranks each of which waits for the next, the first repeated at the end; empty without a
    circle.
    """
    waits_for = {}
    for rank, state in states.items():
        inside = state["inside"]
        if inside is None:
            continue
        if inside["peer"] is not None:
            waits_for[rank] = inside["peer"]
            continue
        same = [other for other, s in states.items() if s["inside"] and other in inside["ranks"]
                and (s["inside"]["axis"], s["inside"]["seq"]) == (inside["axis"], inside["seq"])]
        missing = [other for other in inside["ranks"] if other not in same]
        if missing:
            waits_for[rank] = missing[0]
    for start in waits_for:
        path = [start]
        while path[-1] in waits_for and waits_for[path[-1]] not in path:
            path.append(waits_for[path[-1]])
        if waits_for.get(path[-1]) in path:
            first = path.index(waits_for[path[-1]])
            return [*path[first:], path[first]]
    return []
