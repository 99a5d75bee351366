"""A timeline as a picture: one self-contained SVG, a row for each worker, a box for each pass."""

from xml.sax.saxutils import escape

from mpipar.pipeline.draw import compute_spans, label, number
from mpipar.pipeline.simulate import Span, Timeline

ROW, LEFT, TOP, WIDTH = 26, 74, 46, 1400  # pixels
# Fill of a pass by kind; the second half of a rank's stages is drawn in the darker shade.
FILLS = {
    "F": ("#9ecae1", "#4292c6"),
    "B": ("#a1d99b", "#41ab5d"),
    "I": ("#c7e9c0", "#74c476"),
    "W": ("#fdd0a2", "#fd8d3c"),
    "OVERLAP_F_B": ("#dadaeb", "#9e9ac8"),
}
WORDS = {
    "F": "F forward",
    "B": "B backward",
    "I": "I input gradient",
    "W": "W weight gradient",
    "OVERLAP_F_B": "F&B overlapped",
}


def svg(timeline: Timeline, title: str) -> str:
    """The picture as text; a box carries its pass where there is room, and a tooltip everywhere."""
    rows = compute_spans(timeline)
    scale = float(WIDTH / timeline.makespan)
    height = TOP + ROW * len(rows) + 30
    size = f'width="{LEFT + WIDTH + 20}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>',
    ]
    used = {span.instr.kind for spans in rows for span in spans}
    x = LEFT
    for kind in (kind for kind in WORDS if kind in used):
        parts.append(f'<rect x="{x}" y="24" width="12" height="12" fill="{FILLS[kind][0]}"/>')
        parts.append(f'<text x="{x + 16}" y="34">{escape(WORDS[kind])}</text>')
        x += 130
    for pp_rank, spans in enumerate(rows):
        y = TOP + ROW * pp_rank
        parts.append(f'<text x="4" y="{y + 16}">worker {pp_rank}</text>')
        area = f'x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW - 4}"'
        parts.append(f'<rect {area} fill="#f0f0f0"/>')
        for span in spans:
            parts += box(timeline, span, pp_rank, y, scale)
    y = TOP + ROW * len(rows) + 16
    for k in range(11):
        time = timeline.makespan * k / 10
        parts.append(
            f'<text x="{LEFT + WIDTH * k / 10:.0f}" y="{y}" text-anchor="middle">'
            f"{number(time)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def box(timeline: Timeline, span: Span, pp_rank: int, y: int, scale: float) -> list[str]:
    """The elements of one pass."""
    held = timeline.schedule.stages_of(pp_rank)
    late = held.index(span.instr.stage) * 2 >= len(held) > 1
    left, width = LEFT + float(span.start) * scale, float(span.end - span.start) * scale
    text = escape(label(timeline, span.instr))
    area = f'x="{left:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 4}"'
    fill = f'fill="{FILLS[span.instr.kind][late]}" stroke="white" stroke-width="0.5"'
    tip = f"<title>{text}: {number(span.start)} to {number(span.end)}</title>"
    elements = [f"<rect {area} {fill}>{tip}</rect>"]
    if width >= 7 * len(label(timeline, span.instr)):
        place = f'x="{left + width / 2:.2f}" y="{y + 15}" text-anchor="middle"'
        elements.append(f'<text {place} pointer-events="none">{text}</text>')
    return elements
