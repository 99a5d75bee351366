"""A timeline as a picture: one self-contained SVG, a row for each worker, a box for each pass.

Idle time is hatched, and an arrow leads from the pass that sends a message to the pass that needs
it. The picture is as wide as its passes need, follows a light or dark page, and scales with it.
"""

from math import ceil
from numbers import Real
from xml.sax.saxutils import escape

from mpipar.pipeline.draw import compute_spans, label, short_number, tick_step
from mpipar.pipeline.instructions import neighbours
from mpipar.pipeline.simulate import Span, Timeline

ROW, LEFT, RIGHT, TOP, BOTTOM = 26, 74, 24, 46, 24  # pixels
CHARACTER, LETTER = 6.2, 8.5  # width of a character in words, and in a label such as 5W0, at 11 px
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
    'class="head"/></marker></defs>')


def svg(timeline: Timeline, title: str) -> str:
    """The picture as text; every box has a tooltip, and names its pass where there is room."""
    rows = compute_spans(timeline)
    legend = legend_entries(timeline, rows)
    width = drawing_width(timeline, rows, legend, title)
    scale = width / timeline.makespan
    size = f"{LEFT + width + RIGHT:.0f} {TOP + ROW * len(rows) + BOTTOM}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" '
        'width="{}" height="{}">'.format(*size.split()),
        f"<title>{escape(title)}</title><style>{STYLE}</style>{DEFINITIONS}",
        f'<text x="{LEFT}" y="16" style="font-size: 13px">{escape(title)}</text>',
    ]
    x = LEFT
    for names, text in legend:
        parts += [f'<rect x="{x + 14 * k}" y="24" width="12" height="12" class="{name}"/>'
                  for k, name in enumerate(names)]
        x += 14 * len(names) + 2
        parts.append(f'<text x="{x}" y="34">{escape(text)}</text>')
        x += ceil(CHARACTER * len(text)) + LEGEND
    for pp_rank, spans in enumerate(rows):
        y = TOP + ROW * pp_rank
        parts.append(f'<text x="4" y="{y + 16}">worker {pp_rank}</text>')
        area = f'x="{LEFT}" y="{y}" width="{width:.2f}" height="{ROW - 4}"'
        parts.append(f'<rect {area} class="area"/>')
        for span in spans:
            parts += box(timeline, span, pp_rank, y, scale)
    parts += arrows(timeline, rows, scale)
    parts += ticks(timeline.makespan, scale, TOP + ROW * len(rows) + 14)
    return "\n".join([*parts, "</svg>", ""])


def legend_entries(timeline: Timeline, rows: list[list[Span]]) -> list[tuple[tuple[str, ...], str]]:
    """(classes of the boxes, text) of each kind of pass, with both shades where both are drawn."""
    used: dict[str, set] = {}
    for pp_rank, spans in enumerate(rows):
        for span in spans:
            used.setdefault(span.instr.kind, set()).add(is_late(timeline, span, pp_rank))
    entries = [(tuple(f"{kind}{' late' * late}" for late in sorted(used[kind])), text)
               for kind, text in WORDS.items() if kind in used]
    if any(len(shades) > 1 for shades in used.values()):
        entries.append(((), "darker: later stages of a worker"))
    if any(timeline.global_bubble):
        entries.append((("area",), "idle"))
    return entries


def drawing_width(timeline: Timeline, rows, legend, title: str) -> float:
    """Pixels for the passes; all labels fit unless that takes more than WIDEST."""
    needed = max((LETTER * len(label(timeline, span.instr)) + 4) * float(
        timeline.makespan / (span.end - span.start)) for spans in rows for span in spans)
    words = sum(14 * len(names) + 2 + ceil(CHARACTER * len(text)) + LEGEND
                for names, text in legend)
    least = max(NARROWEST, words - LEGEND, 1.2 * CHARACTER * len(title))
    return max(least, min(needed, WIDEST))


def arrows(timeline: Timeline, rows: list[list[Span]], scale: Real) -> list[str]:
    """An arrow for each message between workers, from the end of a pass to the start of another."""
    ends, found = {}, []
    for spans in rows:
        for span in spans:
            for message in neighbours(timeline.schedule, span.instr)[1]:
                ends[message] = span.end
    for spans in rows:
        for span in spans:
            for message in neighbours(timeline.schedule, span.instr)[0]:
                if message.is_remote:
                    down = message.target > message.source
                    y1 = TOP + ROW * message.source + (ROW - 4) * down
                    y2 = TOP + ROW * message.target + (ROW - 4) * (not down)
                    x1, x2 = (LEFT + float(time * scale) for time in (ends[message], span.start))
                    found.append(f'<path class="message" marker-end="url(#head)" '
                                 f'd="M{x1:.1f} {y1}L{x2:.1f} {y2}"/>')
    return found if len(found) <= MOST_ARROWS else []


def ticks(makespan: Real, scale: Real, y: int) -> list[str]:
    """Round times below the rows, far enough apart for their texts."""
    longest = len(short_number(makespan)) + 2
    step = tick_step(max(TICK, CHARACTER * longest + 8) / float(scale))
    return [f'<text x="{LEFT + float(k * step * scale):.2f}" y="{y}" text-anchor="middle">'
            f"{short_number(k * step)}</text>" for k in range(int(makespan / step) + 1)]


def is_late(timeline: Timeline, span: Span, pp_rank: int) -> bool:
    """Whether the pass belongs to the second half of its worker's stages."""
    held = timeline.schedule.stages_of(pp_rank)
    return held.index(span.instr.stage) * 2 >= len(held) > 1


def box(timeline: Timeline, span: Span, pp_rank: int, y: int, scale: Real) -> list[str]:
    """The elements of one pass."""
    left, width = LEFT + float(span.start * scale), float((span.end - span.start) * scale)
    text = label(timeline, span.instr)
    area = f'x="{left:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 4}"'
    kind = f"pass {span.instr.kind}{' late' * is_late(timeline, span, pp_rank)}"
    tip = f"<title>{escape(text)}: {short_number(span.start)} to {short_number(span.end)}</title>"
    elements = [f'<rect {area} class="{kind}">{tip}</rect>']
    if width >= LETTER * len(text) + 2:
        place = f'x="{left + width / 2:.2f}" y="{y + 15}"'
        elements.append(f'<text {place} class="pass-text">{escape(text)}</text>')
    return elements
