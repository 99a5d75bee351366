"""A trace as text: one row per rank, one letter per slice of time."""

from __future__ import annotations

from mpipar.run.trace.trace_file import Trace
from mpipar.study.trace.segments import Segment, by_step

LETTERS = {
    "F": "F",
    "B": "B",
    "I": "I",
    "W": "W",
    "opt": "o",
    "data": "d",
    "eval": "e",
    "save": "s",
    "gc": "g",
    "wait": ".",
    "transfer": "-",
    "other": " ",
}
LEGEND = (
    "F B I W passes, o optimizer, d data, e evaluates, s saves, g collects garbage, . waits,"
    " - transfer"
)


def timeline(
    trace: Trace,
    segments: list[list[Segment]],
    width: int = 100,
    window: tuple[int, int] | None = None,
) -> str:
    """Return a row of letters per rank; each slice shows what the rank did for most of it.

    width: the most characters of a line. window: start and end in ns, by default the whole trace.
    """
    start, end = window or (trace.start, trace.end)
    heads = [f"rank {rank.world_rank} " for rank in trace.ranks]
    margin = max(map(len, heads))
    columns = width - margin
    length = (end - start) / columns
    first_ms, last_ms = f"{start * 1e-6:.1f}", f"{end * 1e-6:.1f}"
    lines = [f"{'ms':<{margin}}{first_ms}{last_ms:>{columns - len(first_ms)}}"]
    slices = [(at, start + at * length, start + (at + 1) * length) for at in range(columns)]
    for head, own in zip(heads, segments, strict=True):
        row = (LETTERS[max(sums, key=sums.get)] if sums else " " for sums in by_step(own, slices))
        lines.append((head.ljust(margin) + "".join(row)).rstrip())
    return "\n".join([*lines, LEGEND])


def median_step(trace: Trace) -> tuple[int, tuple[int, int]]:
    """Return (step, (start, end) over all ranks) of the step of median length."""
    windows = trace.windows()
    order = sorted(range(trace.num_steps), key=lambda i: windows[i][1] - windows[i][0])
    chosen = order[len(order) // 2]
    return trace.ranks[0].steps[chosen][0], windows[chosen]
