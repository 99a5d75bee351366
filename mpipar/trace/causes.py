"""Why ranks waited: every wait is charged to what the late rank did meanwhile.

While a rank waits, the late rank computes, reads data, transfers, or itself waits for a third. Such
chains are followed to a rank that does not wait. So a wait that travels along a pipeline is charged
to where the time went, not to the neighbour.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from mpipar.comm.record import COMPUTE, family
from mpipar.trace.segments import IDLE, Segment
from mpipar.trace.trace_file import Trace
from mpipar.trace.waits import Waits

WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient",
         "opt": "optimizer", "data": "data loading"}


class Cause(NamedTuple):
    """What made others wait: ranks (one, or the ends of a link), what they did, and details.

    kind: compute, opt, data, other or transfer.
    """

    kind: str
    ranks: tuple[int, ...]
    what: str

    def text(self) -> str:
        """As in `rank 1: forward of stage 1`."""
        if self.kind == "transfer":
            return f"{self.what} between ranks {'-'.join(map(str, self.ranks))}"
        return f"rank {self.ranks[0]}: {self.what}"


@dataclass
class Cost:
    """How long others waited for a cause: in total, by waiting rank, and by barrier."""

    wait_ns: int = 0
    by_rank: Counter = field(default_factory=Counter)
    by_barrier: Counter = field(default_factory=Counter)


class Causes:
    """Finds the causes of all waits of a trace."""

    def __init__(self, trace: Trace, waits: Waits, segments: list[list[Segment]]):
        self.segments = segments
        self.starts = [[segment.start for segment in own] for own in segments]
        self.operations = [rank.operations for rank in trace.ranks]
        self.operation_starts = [[one.start_ns for one in own] for own in self.operations]
        self.waits = waits

    def costs(self) -> dict[Cause, Cost]:
        """Every cause with its cost, the largest first."""
        found: dict[Cause, Cost] = defaultdict(Cost)
        for own in self.waits.calls:
            for call in own:
                if not call.wait_ns:
                    continue
                start = call.record.waited_ns
                for cause, length in self.blame(call.late, start, start + call.wait_ns):
                    cost = found[cause]
                    cost.wait_ns += length
                    cost.by_rank[call.rank] += length
                    cost.by_barrier[call.record.axis, family(call.record.name)] += length
        order = sorted(found, key=lambda cause: -found[cause].wait_ns)
        return {cause: found[cause] for cause in order}

    def blame(self, rank: int, start: int, end: int, depth: int = 0):
        """Yield (Cause, nanoseconds); together they make up [start, end) of the late rank."""
        own = self.segments[rank]
        index = max(0, bisect_right(self.starts[rank], start) - 1)
        covered = 0
        for segment in own[index:]:
            if segment.start >= end:
                break
            low, high = max(start, segment.start), min(end, segment.end)
            if high <= low:
                continue
            covered += high - low
            if segment.kind == "wait" and depth < len(self.segments):
                yield from self.blame(segment.call.late, low, high, depth + 1)
            elif segment.kind in IDLE:
                event = segment.call.event
                ranks = event.ranks if event else (rank,)
                record = segment.call.record
                yield Cause("transfer", ranks,
                            f"transfer of {family(record.name)} ({record.axis})"), high - low
            elif segment.kind in COMPUTE:
                yield from self._computing(rank, segment, low, high)
            else:
                what = "between spans (Python, posting, logging)"
                yield Cause("other", (rank,), what), high - low
        if covered < end - start:  # before its first or after its last traced step
            yield Cause("other", (rank,), "outside the traced steps"), end - start - covered

    def _computing(self, rank, segment, low, high):
        """Causes of a compute segment, split by operation if the trace timed layers' operations."""
        span = segment.span
        kind = segment.kind if segment.kind in ("opt", "data") else "compute"
        what = WORDS[segment.kind] + (f" of stage {span.stage}" if kind == "compute" else "")
        left = high - low
        starts = self.operation_starts[rank]
        for one in self.operations[rank][max(0, bisect_right(starts, low) - 1):]:
            if one.start_ns >= high:
                break
            length = min(high, one.end_ns) - max(low, one.start_ns)
            if length > 0:
                left -= length
                layer = f"{family(one.layer)}." if one.layer else ""
                yield Cause(kind, (rank,), f"{what}, {layer}{one.function}"), length
        if left > 0:
            yield Cause(kind, (rank,), what), left
