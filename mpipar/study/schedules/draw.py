"""Draws a timeline as text and as a picture: a row for each worker, a cell for each of its passes.

The worker x time grid consists of characters. A cell is as long as its pass and names it: F3, or
2F3 for stage 2 where a rank holds several stages. Dots are idle time. The symbols F_k, B_k are
listed in order of time. The picture is one self-contained SVG in which idle time is hatched and an
arrow leads from the pass that sends a message to the pass that needs it. It is as wide as its
passes need, adapts to a light or dark page, and scales with it.
"""

import html
from collections.abc import Iterator
from math import ceil, floor, log10
from typing import NamedTuple

from mpipar.pipeline.instructions import Instr, Schedule, is_compute, neighbours, parts
from mpipar.run.console.tables import table
from mpipar.study.schedules.simulate import Costs, Number, Timeline, simulate

WIDTH = 100  # characters of a line
MAX_PANELS = 6  # panels below each other; of a longer step the beginning is drawn
ROW, LEFT, RIGHT, TOP, BOTTOM = 26, 74, 24, 46, 24  # pixels
CHARACTER, LETTER = 6.2, 8.5  # width of a character in text, and in a label such as 5W0, at 11 px
NARROWEST, WIDEST = 360, 4000  # width of the part with the passes
LEGEND, TICK = 24, 56  # space after a legend's text; least distance of two ticks
MOST_ARROWS = 100  # more of them would hide the passes
WORDS = {
    "F": "F forward",
    "B": "B backward",
    "I": "I input gradient",
    "W": "W weight gradient",
    "OVERLAP_F_B": "F&B overlapped",
}
# The names of a pass where a worker holds one stage, and several; what joins the two of an overlap.
PLAIN = "{kind}{mb}", "{stage}{kind}{mb}", "&"
SYMBOL = "{kind}_{mb}", "{kind}_{mb}^{stage}", " & "
ARROWS = {"F": "\u2191", "B": "\u2193"}  # the direction of a pass in a textbook's drawing
NOTATION = """\
F_k is the forward pass of microbatch k, B_k its backward pass; I_k and W_k are the halves of
a backward pass, input gradient and weight gradient. F_k^s is that of stage s, where a worker holds
several stages. The column says on which worker.
Some textbooks write B_l for block l, with an arrow for the direction.
Their B_l up is F here, in the column of the worker that holds block l.
Their B_l down is the backward pass there: B, or I and W."""
# Each kind of pass has a CSS class. .late marks the second half of a worker's stages.
STYLE = """
svg { font: 11px sans-serif; background: #ffffff; }
text { fill: #222222; } .area { fill: url(#idle); } .pass { stroke: #ffffff; stroke-width: 0.5; }
.ground { fill: #f0f0f0; } .hatch { stroke: #c4c4c4; stroke-width: 1.5; }
.message { stroke: #7a1f5c; stroke-width: 1; fill: none; pointer-events: none; }
.head { fill: #7a1f5c; }
.pass-text { fill: #111111; text-anchor: middle; pointer-events: none; }
.F { fill: #9ecae1; } .F.late { fill: #4292c6; } .B { fill: #a1d99b; } .B.late { fill: #41ab5d; }
.I { fill: #c7e9c0; } .I.late { fill: #74c476; } .W { fill: #fdd0a2; } .W.late { fill: #fd8d3c; }
.OVERLAP_F_B { fill: #dadaeb; } .OVERLAP_F_B.late { fill: #9e9ac8; }
@media (prefers-color-scheme: dark) {
svg { background: #16191d; } text { fill: #d8dce2; } .ground { fill: #24292f; }
.hatch { stroke: #464d56; } .message { stroke: #ff9ad5; } .head { fill: #ff9ad5; }
.pass { stroke: #16191d; } .pass-text { fill: #111111; }
}
""".strip()
DEFINITIONS = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" class="ground"/>'
    '<path d="M0 0V6" class="hatch"/></pattern><marker id="head" viewBox="0 0 8 8" refX="7" '
    'refY="4" markerWidth="6" markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8Z" '
    'class="head"/></marker></defs>'
)


class Cell(NamedTuple):
    """A pass that takes time. late: whether its stage is in the second half of its worker's."""

    instr: Instr
    start: Number
    end: Number
    text: str
    late: bool


def layout(timeline: Timeline) -> list[list[Cell]]:
    """Return the cells of each worker, from which all drawings are made."""
    rows: list[list[Cell]] = []
    for held, spans in zip(timeline.schedule.stages_by_rank, timeline.spans, strict=True):
        late = held[len(held) // 2 + len(held) % 2 :] if len(held) > 1 else ()
        rows.append(
            [
                Cell(instr, start, end, label(timeline.schedule, instr), instr.stage in late)
                for instr, start, end in spans
                if is_compute(instr) and end > start
            ]
        )
    return rows


def label(schedule: Schedule, instr: Instr, form: tuple[str, str, str] = PLAIN) -> str:
    """Return the name of a pass, without the stage where each rank holds only one."""
    alone, staged, between = form
    text = alone if schedule.num_stages == schedule.pp_size else staged
    return between.join(
        text.format(kind=kind, stage=stage, mb=mb) for kind, stage, mb in parts(instr)
    )


def round_times(first: Number, last: Number, least: Number) -> Iterator[Number]:
    """Yield the round times from first to last, at least `least` apart.

    They are multiples of ..., 0.1, 0.2, 0.5, 1, 2, 5, 10, ..., and exact where `least` is at least
    1.
    """
    power: Number = 10 ** floor(log10(least))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least)
    k = ceil(first / step)
    while k * step <= last:
        yield k * step
        k += 1


def short_number(value: Number) -> str:
    """Return a time or size in at most about eight characters; integers in full."""
    return str(int(value)) if value == int(value) else f"{float(value):.6g}"


# As text.


def one_step(schedule: Schedule) -> str:
    """Return the grid of one step in which each pass takes its usual time, for a run's log."""
    timeline = simulate(schedule, Costs())
    idle = 1 - sum(timeline.busy_share) / len(timeline.busy_share)
    head = f"one step of {schedule.name}, one row per pipeline rank, bubble {idle:.0%}"
    return f"\n{head}:\n{grid(timeline)}\n"


def grid(timeline: Timeline, width: int = WIDTH, book: bool = False) -> str:
    """Return the worker x time grid in lines of at most `width` characters.

    Long steps are broken into panels, at most MAX_PANELS. book: in the notation of textbooks, see
    `book_label`: workers count from 1, and the last one is on top.
    """
    rows = layout(timeline)
    heads = [f"worker {pp_rank + book} " for pp_rank in range(len(rows))]
    if book:
        heads.reverse()
        rows = [
            [cell._replace(text=book_label(timeline.schedule, cell.instr)) for cell in row]
            for row in reversed(rows)
        ]
    head_width = len(max(heads, key=len))
    room = width - head_width
    single = [cell for row in rows for cell in row if cell.instr.kind != "OVERLAP_F_B"]
    unit = max(len(cell.text) for cell in single) + 1
    scale = unit / min(cell.end - cell.start for cell in single)
    columns = -(-round(timeline.makespan * scale) // unit)  # of one unit each
    panels = -(-columns // max(room // unit, 1))
    panel = -(-columns // panels) * unit
    length = min(columns * unit, MAX_PANELS * panel)
    shown = [[cell for cell in row if cell.start * scale < length] for row in rows]
    lines = [named_line(row, length, scale, unit) for row in shown]
    blocks = []
    for start in range(0, length, panel):
        block = [f"{'time':<{head_width}}{ruler(start, min(panel, length - start), scale)}"]
        block += [
            f"{head:<{head_width}}{line[start : start + panel]}"
            for head, line in zip(heads, lines, strict=True)
        ]
        blocks.append("\n".join(line.rstrip() for line in block))
    if panels > MAX_PANELS:
        blocks.append("... and so on; --svg FILE draws the whole step")
    return "\n\n".join(blocks)


def book_label(schedule: Schedule, instr: Instr) -> str:
    """Return a pass in textbook notation: block l from 1, its microbatch k, and the direction.

    B2 with an arrow up is the forward pass of block 2; B2,3 is that of its microbatch 3.
    """
    number = f",{instr.mb + 1}" if schedule.num_microbatches > 1 else ""
    return f"B{instr.stage + 1}{number}{ARROWS[instr.kind]}"


def named_line(row: list[Cell], length: int, scale: Number, unit: int) -> str:
    """Return a worker's line that names every pass, with a dot for each unit of idle time."""

    def idle(length: int) -> str:
        return (".".ljust(unit) * length)[:length]

    line = ""
    for cell in row:
        start, end = round(cell.start * scale), round(cell.end * scale)
        line += idle(start - len(line))
        line += cell.text[: end - start - 1].ljust(end - start - 1, "-") + " "
    return line + idle(length - len(line))


def ruler(first: int, length: int, scale: Number) -> str:
    """Return times above columns first .. first + length - 1, at `scale` columns per time unit."""
    line = [" "] * (length + 10)
    for time in round_times(first / scale, (first + length) / scale, 10 / scale):
        column = round(time * scale) - first
        if column < length:
            line[column : column + len(str(time))] = str(time)
    return "".join(line[:length])


def symbols(timeline: Timeline) -> str:
    """Return what every worker starts and when, with a line for each time at which a pass starts.

    F_3 is the forward of microbatch 3, F_3^2 that of its stage 2.
    """
    starts = [
        {cell.start: label(timeline.schedule, cell.instr, SYMBOL) for cell in row}
        for row in layout(timeline)
    ]
    times = sorted({time for named in starts for time in named})
    rows = [(short_number(time), *(named.get(time, "") for named in starts)) for time in times]
    head = ("time", *(f"worker {pp_rank}" for pp_rank in range(len(starts))))
    return table([head, *rows], left=len(head))


def book_notation(schedule: Schedule) -> str:
    """Return what the marks of a textbook's drawing mean, and where mpipar counts differently."""
    mark, of = (
        ("Bl,k", "block l for microbatch k") if schedule.num_microbatches > 1 else ("Bl", "block l")
    )
    return (
        f"{mark}{ARROWS['F']} is the forward pass of {of}, {mark}{ARROWS['B']} its backward"
        " pass.\nBlocks and workers count from 1 here: worker 1 is worker 0 elsewhere, and"
        " block 1 is stage 0."
    )


# As a picture.


Legend = list[tuple[tuple[str, ...], str]]  # (classes of the boxes, text) of each entry


def svg(timeline: Timeline, title: str) -> str:
    """Return the picture as text; every box has a tooltip, and names its pass if there is room."""
    rows = layout(timeline)
    legend = legend_entries(timeline, rows)
    width = drawing_width(timeline, rows, legend, title)
    scale = width / float(timeline.makespan)
    size = f"{LEFT + width + RIGHT:.0f} {TOP + ROW * len(rows) + BOTTOM}"
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" '
        'width="{}" height="{}">'.format(*size.split()),
        f"<title>{escape(title)}</title><style>{STYLE}</style>{DEFINITIONS}",
        f'<text x="{LEFT}" y="16" style="font-size: 13px">{escape(title)}</text>',
    ]
    x = LEFT
    for names, text in legend:
        elements += [
            f'<rect x="{x + 14 * k}" y="24" width="12" height="12" class="{name}"/>'
            for k, name in enumerate(names)
        ]
        x += 14 * len(names) + 2
        elements.append(f'<text x="{x}" y="34">{escape(text)}</text>')
        x += ceil(CHARACTER * len(text)) + LEGEND
    for pp_rank in range(len(rows)):
        y = TOP + ROW * pp_rank
        elements.append(f'<text x="4" y="{y + 16}">worker {pp_rank}</text>')
        area = f'x="{LEFT}" y="{y}" width="{width:.2f}" height="{ROW - 4}"'
        elements.append(f'<rect {area} class="area"/>')
    elements += [
        part
        for pp_rank, row in enumerate(rows)
        for cell in row
        for part in box(cell, TOP + ROW * pp_rank, scale)
    ]
    elements += arrows(timeline.schedule, rows, scale)
    least = max(TICK, CHARACTER * (len(short_number(timeline.makespan)) + 2) + 8) / scale
    elements += [
        f'<text x="{LEFT + float(time) * scale:.2f}" y="{TOP + ROW * len(rows) + 14}"'
        f' text-anchor="middle">{short_number(time)}</text>'
        for time in round_times(0, timeline.makespan, least)
    ]
    return "\n".join([*elements, "</svg>", ""])


def escape(text: str) -> str:
    """Escape text for an element; xml.sax.saxutils would load urllib at every start."""
    return html.escape(text, quote=False)


def legend_entries(timeline: Timeline, rows: list[list[Cell]]) -> Legend:
    """Return an entry for each kind of pass, with both shades where both are drawn."""
    used: dict[str, set[bool]] = {}
    for cell in (cell for row in rows for cell in row):
        used.setdefault(cell.instr.kind, set()).add(cell.late)
    entries: Legend = [
        (tuple(f"{kind}{' late' * late}" for late in sorted(used[kind])), text)
        for kind, text in WORDS.items()
        if kind in used
    ]
    if any(len(shades) > 1 for shades in used.values()):
        entries.append(((), "darker: later stages of a worker"))
    if any(timeline.global_bubble):
        entries.append((("area",), "idle"))
    return entries


def drawing_width(timeline: Timeline, rows: list[list[Cell]], legend: Legend, title: str) -> float:
    """Return the pixels for the passes; all labels fit unless that takes more than WIDEST."""
    needed = max(
        (LETTER * len(cell.text) + 4) * float(timeline.makespan / (cell.end - cell.start))
        for row in rows
        for cell in row
    )
    words = sum(
        14 * len(names) + 2 + ceil(CHARACTER * len(text)) + LEGEND for names, text in legend
    )
    return max(NARROWEST, words - LEGEND, 1.2 * CHARACTER * len(title), min(needed, WIDEST))


def arrows(schedule: Schedule, rows: list[list[Cell]], scale: float) -> list[str]:
    """Return an arrow for each message between workers, from its source to its target pass."""
    cells = [cell for row in rows for cell in row]
    ends = {message: cell.end for cell in cells for message in neighbours(schedule, cell.instr)[1]}
    found = []
    for cell in cells:
        for message in neighbours(schedule, cell.instr)[0]:
            if message.is_remote:
                down = message.target > message.source
                y1 = TOP + ROW * message.source + (ROW - 4) * down
                y2 = TOP + ROW * message.target + (ROW - 4) * (not down)
                x1, x2 = (LEFT + float(time) * scale for time in (ends[message], cell.start))
                found.append(
                    f'<path class="message" marker-end="url(#head)" '
                    f'd="M{x1:.1f} {y1}L{x2:.1f} {y2}"/>'
                )
    return found if len(found) <= MOST_ARROWS else []


def box(cell: Cell, y: int, scale: float) -> list[str]:
    """Return the elements of one pass."""
    left, width = LEFT + float(cell.start) * scale, float(cell.end - cell.start) * scale
    area = f'x="{left:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 4}"'
    tip = f"{escape(cell.text)}: {short_number(cell.start)} to {short_number(cell.end)}"
    kind = f"pass {cell.instr.kind}{' late' * cell.late}"
    elements = [f'<rect {area} class="{kind}"><title>{tip}</title></rect>']
    if width >= LETTER * len(cell.text) + 2:
        place = f'x="{left + width / 2:.2f}" y="{y + 15}"'
        elements.append(f'<text {place} class="pass-text">{escape(cell.text)}</text>')
    return elements
