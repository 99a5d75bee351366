"""What the steps of a run have measured: overlap, shares, bubble and memory of every rank."""

from __future__ import annotations

from mpipar.comm.objects import gather_objects
from mpipar.comm.record import COMPUTE, POINT_TO_POINT, Recorder
from mpipar.run.console import tables as console
from mpipar.run.console.memory import process_peak
from mpipar.run.console.time_shares import share_facts, share_table
from mpipar.run.training import Run
from mpipar.study.schedules.bubble import bubble_rows, bubble_table, recorded_facts


def show(training: Run) -> str:
    """Print a step's measured overlap, shares and memory; return its barriers, on world rank 0.

    Comm: one gather over the world.
    """
    worker, memory, log = training.worker, training.memory, training.log
    worker.settle()
    fact = training.fact | {
        "counters": [
            [*key, *counter]
            for key, counter in worker.recorder.counters.items()
            if key.phase in ("F", "I", "recompute", "W", "sync", "opt")
        ],
        "buckets_ns": flight_ns(
            worker.recorder, worker.comms["data"].axis, ("all_reduce", "reduce_scatter")
        ),
        "ring_ns": flight_ns(worker.recorder, "tp", POINT_TO_POINT),
        "measured": memory.peak,
        "objects": memory.objects,
        "process": process_peak(),
        "pp_rank": worker.grid.group_rank("pp"),
        "spans": recorded_facts(worker.recorder),
        "shares": share_facts(worker.recorder),
    }
    facts = gather_objects(training.world, fact)
    if facts:
        sums = f"gradient {'reduce-scatter' if worker.config.memory.zero else 'all-reduce'}"
        overlaps = [
            console.overlap(name, [fact[key] for fact in facts])
            for name, key in ((sums, "buckets_ns"), ("messages of tp", "ring_ns"))
        ]
        log("\n" + (overlaps[0] or f"{sums}: none (dp 1)"))
        if overlaps[1]:
            log(overlaps[1])
        log("\nshares of a step:")
        log(share_table([fact["shares"] for fact in facts], [fact["place"] for fact in facts]))
        if worker.grid.size("pp") > 1:
            shares = bubble_rows(
                [fact["spans"] for fact in facts],
                [fact["pp_rank"] for fact in facts],
                worker.schedule,
            )
            log(
                f"\nbusy share and bubble of {worker.schedule.name},"
                " simulated from the measured passes:"
            )
            log(bubble_table(shares))
        log("\nmemory per rank, peak of a step:")
        log(console.measured_memory(facts))
        steps = training.last - training.first + 1
        return console.barriers([fact["counters"] for fact in facts], steps)
    return ""


def flight_ns(recorder: Recorder, axis: str, operations: tuple[str, ...]) -> tuple[int, int]:
    """Return (ns in which any of these operations over `axis` is in flight, ns overlapped).

    Flight lasts from posting to the end, and is overlapped where the rank computes and is in no
    other wait, not even inside a pass. Blocking operations are left out, and only what is in the
    rings counts.
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
    blocked = [(record.waited_ns, record.done_ns) for record in records]
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
