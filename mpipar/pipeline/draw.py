"""A timeline as text: the worker x time grid, and the symbols F_k, B_k in time order.

In the grid a row is a worker (pipeline rank). A cell is as long as its pass and names it: F3, or
2F3 for stage 2 where a rank holds several stages. Dots are idle time.
"""

from bisect import bisect_right
from math import ceil, floor, log10
from numbers import Real

from mpipar.pipeline.instructions import Instr, Schedule, is_compute, parts
from mpipar.pipeline.simulate import Span, Timeline

WIDTH = 100  # characters of a line
MAX_PANELS = 6  # panels below each other; a longer step is drawn without microbatch numbers


def label(timeline: Timeline, instr: Instr) -> str:
    """The text of a cell: the stage is left out where each rank holds one."""
    linear = timeline.schedule.placement == "linear"
    return "&".join(
        f"{kind}{mb}" if linear else f"{stage}{kind}{mb}" for kind, stage, mb in parts(instr)
    )


def compute_spans(timeline: Timeline) -> list[list[Span]]:
    """The spans that take time, by rank."""
    return [
        [span for span in spans if is_compute(span.instr) and span.end > span.start]
        for spans in timeline.spans
    ]


def grid(timeline: Timeline, width: int = WIDTH) -> str:
    """The worker x time grid in lines of at most `width` characters.

    Long steps are cut into panels; very long ones show one letter for each slice of time.
    """
    rows = compute_spans(timeline)
    heads = [f"worker {pp_rank} " for pp_rank in range(len(rows))]
    head_width = len(max(heads, key=len))
    room = width - head_width
    single = [span for spans in rows for span in spans if span.instr.kind != "OVERLAP_F_B"]
    cell = max(len(label(timeline, span.instr)) for span in single) + 1
    scale = cell / min(span.end - span.start for span in single)
    columns = -(-round(timeline.makespan * scale) // cell)  # of one cell each
    panels = -(-columns // max(room // cell, 1))
    if panels > MAX_PANELS:
        panel, scale = room, room / timeline.makespan
        lines = [slices(spans, room, timeline.makespan) for spans in rows]
    else:
        panel = -(-columns // panels) * cell
        lines = [cells(timeline, spans, columns * cell, scale, cell) for spans in rows]
    blocks = []
    for start in range(0, len(lines[0]), panel):
        ticks = ruler(start, min(panel, len(lines[0]) - start), scale)
        block = [f"{'time':<{head_width}}{ticks}"]
        block += [
            f"{head:<{head_width}}{line[start : start + panel]}"
            for head, line in zip(heads, lines, strict=True)
        ]
        blocks.append("\n".join(line.rstrip() for line in block))
    return "\n\n".join(blocks)


def cells(timeline: Timeline, spans: list[Span], length: int, scale: Real, cell: int) -> str:
    """One row in which every pass is named."""
    row = ""
    for span in spans:
        start, end = round(span.start * scale), round(span.end * scale)
        row += idle(start - len(row), cell)
        text = label(timeline, span.instr)[: end - start - 1]
        row += text.ljust(end - start - 1, "-") + " "
    return row + idle(length - len(row), cell)


def idle(length: int, cell: int) -> str:
    """That many characters of idle time, a dot for each unit cell."""
    return (".".ljust(cell) * length)[:length]


def slices(spans: list[Span], length: int, makespan: Real) -> str:
    """One row with the kind of pass in the middle of each slice of time."""
    starts = [span.start for span in spans]
    row = []
    for column in range(length):
        time = makespan * (2 * column + 1) / (2 * length)
        k = bisect_right(starts, time) - 1
        busy = k >= 0 and spans[k].end > time
        row.append(spans[k].instr.kind[0] if busy else ".")
    return "".join(row)


def ruler(first: int, length: int, scale: Real) -> str:
    """Times above the columns first .. first + length - 1, `scale` columns for a unit of time."""
    step = tick_step(10 / scale)
    row = [" "] * (length + 10)
    time = ceil(first / (step * scale)) * step
    while round(time * scale) < first + length:
        column = round(time * scale) - first
        row[column : column + len(str(time))] = str(time)
        time += step
    return "".join(row[:length])


def tick_step(least: Real) -> Real:
    """The first of ..., 0.1, 0.2, 0.5, 1, 2, 5, 10, ... not below `least`; exact from 1 on."""
    power = 10 ** floor(log10(least))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least)


def symbols(timeline: Timeline, width: int = WIDTH) -> str:
    """What every worker starts and when, with a line for each time at which a pass starts.

    F_3 is the forward of microbatch 3, F_3^2 that of its stage 2. A block shows as many workers as
    fit.
    """
    rows = compute_spans(timeline)
    times = sorted({span.start for spans in rows for span in spans})
    stamps = [short_number(time) for time in times]
    columns = []
    for pp_rank, spans in enumerate(rows):
        named = {span.start: symbol(timeline, span.instr) for span in spans}
        columns.append([f"worker {pp_rank}", *(named.get(time, "") for time in times)])
    head = ["time", *stamps]
    head_width = max(map(len, head)) + 2
    column_width = max(len(text) for column in columns for text in column) + 2
    together = max(1, (width - head_width) // column_width)
    blocks = []
    for first in range(0, len(columns), together):
        lines = zip(head, *columns[first : first + together], strict=True)
        blocks.append("\n".join(
            (stamp.ljust(head_width) + "".join(text.ljust(column_width) for text in texts)).rstrip()
            for stamp, *texts in lines
            if any(texts)
        ))
    return "\n\n".join(blocks)


def notation(schedule: Schedule) -> str:
    """What the symbols mean, beside the notation of textbooks that number the blocks."""
    kinds = {instr.kind for program in schedule.programs for instr in program}
    words = {"F": "F_k is the forward pass of microbatch k", "B": "B_k its backward pass",
             "I": "I_k its input gradient", "W": "W_k its weight gradient"}
    meanings = ", ".join(text for kind, text in words.items()
                         if kind in kinds or (kind in "FB" and "OVERLAP_F_B" in kinds))
    lines = [f"{meanings}. The column says on which worker."]
    if schedule.placement != "linear":
        lines.append("F_k^s is that of stage s, where a worker holds several stages.")
    lines.append("Some textbooks write B_l for block l, with an arrow for the direction.\n"
                 "Their B_l up is F here, in the column of the worker that holds block l.\n"
                 "Their B_l down is the backward pass there: B, or I and W.")
    return "\n".join(lines)


def symbol(timeline: Timeline, instr: Instr) -> str:
    """F_k, or F_k^stage where a rank holds several stages."""
    linear = timeline.schedule.placement == "linear"
    return " & ".join(
        f"{kind}_{mb}" if linear else f"{kind}_{mb}^{stage}" for kind, stage, mb in parts(instr)
    )


def short_number(value: Real) -> str:
    """A time or size in at most about eight characters; integers in full."""
    return str(int(value)) if value == int(value) else f"{float(value):.6g}"
