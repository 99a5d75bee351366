"""Shares of a step in which each rank computes, communicates, or does neither; without a trace.

As in a trace, useful time is that of compute spans minus the communication inside them. A rank is
in communication while a call of a group blocks it, inside a span or not. The rest is Python,
posting messages, and waiting for a core where ranks share cores. A step lasts from the start of its
pipeline span to the end of its optimizer span.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict

from mpipar.comm.record import COMPUTE
from mpipar.console.tables import table
from mpipar.files.text import counted


def share_facts(recorder) -> dict:
    """Return this rank's {useful, communication, rest: seconds}, over steps whole in both rings."""
    spans, starts, ends = defaultdict(list), {}, {}
    for span in recorder.spans:
        if span.kind in COMPUTE:
            spans[span.step].append((span.start_ns, span.end_ns))
        if span.kind == "pipeline":
            starts[span.step] = span.start_ns
        if span.kind == "opt":
            ends[span.step] = span.end_ns
    records = recorder.records
    whole = starts.keys() & ends.keys()
    if records:  # records outnumber spans, so older steps may have only spans left
        whole = {step for step in whole if step >= records[0].step}
    if len(whole) > 1:
        whole.discard(min(whole))  # the oldest may have lost its first spans or records
    sums: Counter = Counter()
    for step in whole:
        sums["rest"] += ends[step] - starts[step]
        spans[step] = sorted(
            one
            for one in spans[step]  # an evaluation after the step computes too
            if starts[step] <= one[0] <= ends[step]
        )
        sums["useful"] += sum(end - start for start, end in spans[step])
    for record in records:
        if record.step in whole and record.waited_ns and record.done_ns > record.waited_ns:
            if not starts[record.step] <= record.waited_ns <= ends[record.step]:
                continue  # after a step: metrics, saving
            blocked = record.done_ns - record.waited_ns
            sums["communication"] += blocked
            own = spans[record.step]
            place = bisect_right(own, (record.waited_ns, ends[record.step])) - 1
            if place >= 0 and record.waited_ns < own[place][1]:
                sums["useful"] -= blocked
    sums["rest"] -= sums["useful"] + sums["communication"]
    return {name: sums[name] * 1e-9 for name in ("useful", "communication", "rest")}


def share_table(facts: list[dict], places: list[str]) -> str:
    """Return the fractions of each rank, which add up to 1. facts: `share_facts` of every rank."""
    rows = [("rank", "place", "useful", "in communication", "rest")]
    for world_rank, (fact, place) in enumerate(zip(facts, places, strict=True)):
        total = sum(fact.values())
        rows.append((world_rank, place, *(f"{value / total:.1%}" for value in fact.values())))
    return table(rows, left=2)


def crowded(hosts: list[str], cores: list[int]) -> str | None:
    """Return a remark on hosts with more ranks than cores, or None.

    hosts, cores: of every rank.
    """
    ranks = Counter(hosts)
    found = {
        host: (ranks[host], have)
        for host, have in zip(hosts, cores, strict=True)
        if ranks[host] > have
    }
    if not found:
        return None
    told = ", ".join(
        f"{count} ranks share {counted(have, 'core')} of {host}"
        for host, (count, have) in found.items()
    )
    return (
        f"{told}: a rank also waits for a core,\nso passes last longer and measured shares"
        " differ from simulated ones"
    )
