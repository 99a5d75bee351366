"""All conclusions from a trace, computed once for all views."""

from dataclasses import dataclass
from functools import cached_property

from mpipar.comm.record import Families
from mpipar.run.console.tables import nbytes
from mpipar.run.trace.trace_file import Trace
from mpipar.study.trace import findings, pop, segments, waits
from mpipar.study.trace.causes import Cause, Causes, Cost

# The categories of a rank's time, in the order in which views show them.
CATEGORIES = ("forward", "backward", "optimizer", "data", "bubble", "waiting", "transfer", "other")
LEAST_MS, LEAST_SHARE = 0.005, 0.005  # of a barrier and of a cause in the tables
CATEGORY_OF = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "backward",
    "opt": "optimizer",
    "data": "data",
    "transfer": "transfer",
    "eval": "other",
    "save": "other",
    "gc": "other",
    "other": "other",
}


@dataclass(frozen=True)
class Analysis:
    """A trace, and its conclusions, each computed when it is first asked for."""

    trace: Trace

    @cached_property
    def waits(self) -> waits.Waits:
        return waits.find(self.trace)

    @cached_property
    def segments(self) -> list[list[segments.Segment]]:
        return segments.of_trace(self.trace, self.waits)

    @cached_property
    def efficiencies(self) -> list[tuple[str, float, str]]:
        return pop.efficiencies(self.trace, self.waits, self.segments)

    @cached_property
    def causes(self) -> Causes:
        return Causes(self.trace, self.waits, self.segments)

    @cached_property
    def costs(self) -> dict[Cause, Cost]:
        return self.causes.costs()

    @cached_property
    def findings(self) -> list[findings.Finding]:
        return findings.find(self.trace, self.waits, self.segments, self.costs)


def category(segment: segments.Segment) -> str:
    """Return the category of a segment: waiting for a pipeline message is bubble.

    All other waits are waiting.
    """
    if segment.kind == "wait":
        return "bubble" if segment.call.record.axis == "pp" else "waiting"
    return CATEGORY_OF[segment.kind]


def rank_cells(analysis: Analysis) -> list[tuple]:
    """Return the table of the ranks' milliseconds per step by category, head first."""
    trace, rows = analysis.trace, [("rank", "place", *CATEGORIES)]
    for rank, own in zip(trace.ranks, analysis.segments, strict=True):
        sums = segments.by_kind(own, kind=category)
        each = (f"{sums[name] * 1e-6 / trace.num_steps:.1f}" for name in CATEGORIES)
        rows.append((rank.world_rank, trace.place(rank), *each))
    return rows


def cause_cells(analysis: Analysis, most: int) -> list[tuple]:
    """Return the table of the largest causes of waiting, head first; those of 0 % are left out.

    Milliseconds are per step and summed over ranks; waiting, at: who waited most, and where.
    """
    total = sum(cost.wait_ns for cost in analysis.costs.values())
    rows = [("cause", "ms", "share", "waiting", "at")]
    for cause, cost in list(analysis.costs.items())[:most]:
        if cost.wait_ns >= LEAST_SHARE * total:
            ms, share = cost.wait_ns * 1e-6 / analysis.trace.num_steps, cost.wait_ns / total
            at = f"rank {cost.rank}", " ".join(cost.barrier)
            rows.append((cause.text(), f"{ms:.2f}", f"{share:.0%}", *at))
    return rows


def barrier_cells(analysis: Analysis) -> list[tuple[str, ...]]:
    """Return the table of barriers as text, head first, without those that took no time.

    One row per axis, barrier name without block number, and operation; costliest first. Numbers
    are per step and summed over ranks. last: the rank that arrived last most often, and how often.
    """
    families, steps = Families(), analysis.trace.num_steps

    def key(call):
        record = call.record
        return record.axis, families[record.name], record.operation

    rows = [("barrier", "operation", "calls", "payload", "wait", "transfer", "last", "source")]
    for (axis, name, operation), entry in waits.totals(analysis.waits, key).items():
        wait_ms, transfer_ms = (ns * 1e-6 / steps for ns in (entry.wait_ns, entry.transfer_ns))
        if wait_ms + transfer_ms < LEAST_MS:
            break
        rows.append(
            (
                f"{axis} {name}",
                operation,
                f"{entry.calls / steps:.4g}",
                nbytes(entry.payload / steps),
                f"{wait_ms:.2f}",
                f"{transfer_ms:.2f}",
                "".join(f"rank {rank} {times}x" for rank, times in entry.last.most_common(1)),
                entry.sites.most_common(1)[0][0].replace("mpipar/", ""),
            )
        )
    return rows
