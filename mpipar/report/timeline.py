"""A trace as text: one row per rank, one letter per slice of time."""

from __future__ import annotations

from mpipar.report.segments import Segment, by_kind
from mpipar.report.trace_file import Trace

LETTERS = {"F": "F", "B": "B", "I": "I", "W": "W", "opt": "o", "data": "d", "wait": ".",
           "transfer": "-", "other": " "}
LEGEND = "F B I W passes, o optimizer, d data, . waits for a late rank, - transfer, blank: the rest"


def timeline(trace: Trace, segments: list[list[Segment]], width: int = 100) -> str:
    """Every slice shows what the rank did for most of it. Lines of at most `width` characters."""
    heads = [f"rank {rank.world_rank} " for rank in trace.ranks]
    margin = max(map(len, heads))
    columns = width - margin
    length = (trace.end - trace.start) / columns
    lines = [f"{'ms':<{margin}}0{(trace.end - trace.start) * 1e-6:>{columns - 1}.1f}"]
    for head, own in zip(heads, segments, strict=True):
        row, first = "", 0
        for column in range(columns):
            low = trace.start + column * length
            high = low + length
            while first < len(own) and own[first].end <= low:
                first += 1
            inside = []
            for segment in own[first:]:
                if segment.start >= high:
                    break
                inside.append(segment)
            sums = by_kind(inside, int(low), int(high))
            row += LETTERS[max(sums, key=sums.get)] if sums else " "
        lines.append((head.ljust(margin) + row).rstrip())
    return "\n".join([*lines, LEGEND])
