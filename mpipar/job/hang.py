"""Who waits for whom: what each rank is doing, by its recorder, and the report of a hang."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from time import perf_counter_ns

from mpipar.comm.record import POINT_TO_POINT, place


def marker(recorder):
    """A value that changes with every operation, span and wait of this rank."""
    where = recorder.step, recorder.phase, recorder.mb
    return where, recorder.newest()  # not their number, which stays the same in a full ring


def waiting_record(recorder):
    """The record of the operation that this rank waits in, or None while it computes."""
    for record in reversed(recorder.records):
        if not record.done_ns and record.waited_ns:
            return record
    return None


def state_of(recorder, comms) -> dict:
    """What this rank is doing, as JSON-able values; called from the watchdog's thread."""
    main = sys._current_frames().get(threading.main_thread().ident)
    stack = []
    while main is not None and len(stack) < 12:
        stack.append(place(main.f_code.co_filename, main.f_lineno) + f" in {main.f_code.co_name}")
        main = main.f_back
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
    return {"step": recorder.step, "phase": recorder.phase, "stage": recorder.stage,
            "mb": recorder.mb, "inside": inside, "stack": stack}


def doing(state: dict | None) -> str:
    """One phrase for what a rank is doing."""
    if state is None:
        return "has written nothing: it works, or its process is stopped or gone"
    inside = state["inside"]
    at = f"step {state['step']}, phase {state['phase']}, stage {state['stage']}, mb {state['mb']}"
    if inside is None:
        where = state["stack"][0] if state["stack"] else "?"
        return f"is in no communication ({at}); its main thread is at {where}"
    target = f" {'to' if inside['operation'] == 'send' else 'from'} rank {inside['peer']}" \
        if inside["peer"] is not None else ""
    return (f"waits in {inside['operation']} {inside['name']}{target} ({inside['axis']}, {at})"
            f" for {inside['seconds']} s at {inside['source']}")


def explain(states: dict[int, dict], world_size: int) -> list[str]:
    """Lines of a report: incomplete barriers, who is missing from each, and what those ranks do.

    If no rank waits in a barrier, they say what every rank does.
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
    return lines or [f"rank {rank} {doing(states.get(rank))}" for rank in range(world_size)]


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
