"""What the steps of a run have measured: shares and memory of every rank.

Shares of a step are those in which a rank computes, communicates, or does neither; without a trace.
As in a trace, useful time is that of compute spans minus the communication inside them. A rank is
in communication while a call of a group blocks it, inside a span or not. The rest is Python,
posting messages, and waiting for a core where ranks share cores. A step lasts from the start of its
pipeline span to the end of its optimizer span.
"""

import resource
from bisect import bisect_right

from mpipar.comm.objects import gather_objects
from mpipar.comm.record import COMPUTE
from mpipar.run.console import tables as console
from mpipar.run.training import Run


def show(training: Run) -> str:
    """Print a step's measured shares and memory; return its barriers, on world rank 0.

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
        "measured": memory.peak,
        # Its peak resident size, with libraries and MPI's buffers.
        "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "shares": share_facts(worker.recorder),
    }
    facts = gather_objects(training.world, fact)
    if facts:
        log("\nshares of a step:")
        log(share_table([fact["shares"] for fact in facts], [fact["place"] for fact in facts]))
        log("\nmemory per rank, peak of a step:")
        log(console.measured_memory(facts))
        steps = training.last - training.first + 1
        return console.barriers([fact["counters"] for fact in facts], steps)
    return ""


def share_facts(recorder) -> dict[str, float]:
    """Return this rank's {useful, communication, rest: seconds}, over steps whole in both rings."""
    starts = {span.step: span.start_ns for span in recorder.spans if span.kind == "pipeline"}
    ends = {span.step: span.end_ns for span in recorder.spans if span.kind == "opt"}
    # Records outnumber spans, so older steps may have only spans left.
    first = recorder.records[0].step if recorder.records else 0
    whole = without_oldest({step for step in starts.keys() & ends.keys() if step >= first})

    def is_inside(step: int, time_ns: int) -> bool:  # evaluation and saving follow a step
        return step in whole and starts[step] <= time_ns <= ends[step]

    passes = sorted(
        (span.start_ns, span.end_ns)
        for span in recorder.spans
        if span.kind in COMPUTE and is_inside(span.step, span.start_ns)
    )
    communication, useful = 0, sum(end - start for start, end in passes)
    for record in recorder.records:
        if record.waited_ns and is_inside(record.step, record.waited_ns):
            blocked = max(0, record.done_ns - record.waited_ns)
            communication += blocked
            place = bisect_right(passes, record.waited_ns, key=lambda one: one[0]) - 1
            useful -= blocked if place >= 0 and record.waited_ns < passes[place][1] else 0
    rest = sum(ends[step] - starts[step] for step in whole) - useful - communication
    return {"useful": useful * 1e-9, "communication": communication * 1e-9, "rest": rest * 1e-9}


def without_oldest(steps: set[int]) -> set[int]:
    """Return the steps that the ring holds as a whole: the oldest may have lost its start."""
    return steps - {min(steps)} if len(steps) > 1 else steps


def share_table(facts: list[dict], places: list[str]) -> str:
    """Return the fractions of each rank, which add up to 1. facts: `share_facts` of every rank."""
    rows = [("rank", "place", "useful", "in communication", "rest")]
    for world_rank, (fact, place) in enumerate(zip(facts, places, strict=True)):
        total = sum(fact.values()) or 1.0  # no step counts if the gradients always overflowed
        rows.append((world_rank, place, *(f"{value / total:.1%}" for value in fact.values())))
    return console.table(rows, left=2)
