"""A plan as one self-contained HTML page: memory and time of the best layouts, and the trade-off.

Bars are drawn as SVG. Colours follow a light or dark page, widths follow the window, and every box
has a tooltip with its number.
"""

from __future__ import annotations

from html import escape

from mpipar.files.text import harmless
from mpipar.plan.footprint import GIB
from mpipar.plan.report import PARTS, layout_words
from mpipar.plan.search import Candidate, Plan, Question

WIDTH, ROW, LEFT, TOP, BOTTOM = 1000, 34, 330, 30, 26  # of a picture, in its own units
COLOURS = ("var(--a)", "var(--b)", "var(--c)", "var(--d)", "var(--e)", "var(--f)", "var(--g)",
           "var(--h)")
STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1b2330, #e4e9f1);
  --soft: light-dark(#5c6779, #94a1b5); --bg: light-dark(#f3f5f8, #0e1218);
  --card: light-dark(#fff, #171d26); --line: light-dark(#c3cad6, #3a4657);
  --limit: light-dark(#d9452b, #ff7a5c); --a: light-dark(#3f74c9, #6c9df0);
  --b: light-dark(#a06c08, #e5b04a); --c: light-dark(#c2278b, #f279c4);
  --d: light-dark(#6b7d00, #bfd14a); --e: light-dark(#e0937f, #b85a44);
  --f: light-dark(#0d8a94, #45cfd9); --g: light-dark(#8457b8, #b38ae0);
  --h: light-dark(#217a4b, #55bd86); }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 20px; background: var(--bg); color: var(--ink);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; } h2 { font-size: 15px; margin: 0 0 8px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 16px; margin: 14px 0; break-inside: avoid; }
svg { width: 100%; height: auto; } text { fill: var(--ink); font-size: 13px; }
.soft { fill: var(--soft); color: var(--soft); } .axis { stroke: var(--line); }
.limit { stroke: var(--limit); stroke-width: 2; stroke-dasharray: 6 4; }
pre { overflow-x: auto; margin: 0; font-size: 12.5px; }
.legend span { display: inline-block; margin: 0 14px 6px 0; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 5px; }
@media print { body { background: #fff; } section { border-color: #bbb; } }
"""


def page(question: Question, plan: Plan, answer: str) -> str:
    """The page. answer: as it is printed. Every text in it is escaped."""
    shape = question.shape
    title = (f"{shape.parameters / 1e9:.2f} billion parameters on {question.ranks} x"
             f" {question.cluster.name}")
    parts = [section("The answer", f"<pre>{safe(answer)}</pre>")]
    if plan.best:
        parts[:0] = [
            section("Seconds of a step", legend(PARTS.values()) + bars(
                [list(one.step) for one in plan.best], list(PARTS.values()), plan.best, "s")),
            section("Memory of the fullest rank, GiB", legend(memory_names()) + bars(
                [memory_values(one) for one in plan.best], memory_names(), plan.best, "GiB",
                limit=question.gib)),
            section("Memory against time: no layout has less of both", front(question, plan))]
    return ("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
            f"<title>{safe(title)}</title><style>{STYLE}</style></head>\n<body>"
            f"<h1>{safe(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n")


def safe(text: str) -> str:
    """Text that is only text in a page."""
    return escape(harmless(text))


def section(title: str, body: str) -> str:
    """A card of the page."""
    return f"<section><h2>{safe(title)}</h2>{body}</section>"


def memory_names() -> list[str]:
    """The labels of a rank's memory."""
    return ["weights", "gradients", "optimizer", "stash", "buffers", "reserve"]


def memory_values(one: Candidate) -> list[float]:
    """The GiB of each label."""
    return [size / GIB for size in (*one.memory, one.memory.reserve)]


def legend(names) -> str:
    """The colours and what they stand for."""
    spans = "".join(f"<span><i style=\"background:{colour}\"></i>{safe(name)}</span>"
                    for name, colour in zip(names, COLOURS, strict=False))
    return f"<p class=\"legend\">{spans}</p>"


def bars(rows: list[list[float]], names: list[str], layouts: list[Candidate], unit: str,
         limit: float | None = None) -> str:
    """A stacked bar for each layout, and a line where the device's memory ends."""
    most = max(*(sum(row) for row in rows), limit or 0.0)
    scale = (WIDTH - LEFT - 70) / most
    height = TOP + ROW * len(rows) + BOTTOM
    parts = [f"<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">"]
    for place, (row, one) in enumerate(zip(rows, layouts, strict=True)):
        x, y = float(LEFT), TOP + ROW * place
        words = layout_words(one.layout)
        parts.append(f"<text x=\"0\" y=\"{y + 16}\">{safe(short(words))}<title>{safe(words)}"
                     "</title></text>")
        for value, name, colour in zip(row, names, COLOURS, strict=False):
            if value > 0:
                parts.append(f"<rect x=\"{x:.1f}\" y=\"{y}\" width=\"{value * scale:.1f}\""
                             f" height=\"22\" fill=\"{colour}\"><title>{safe(name)}: {value:.3g}"
                             f" {unit}</title></rect>")
            x += value * scale
        parts.append(f"<text x=\"{WIDTH}\" y=\"{y + 16}\" text-anchor=\"end\">{sum(row):.3g}"
                     "</text>")
    if limit is not None:
        x = LEFT + limit * scale
        parts.append(f"<line class=\"limit\" x1=\"{x:.1f}\" x2=\"{x:.1f}\" y1=\"14\""
                     f" y2=\"{height - BOTTOM}\"/><text x=\"{x - 6:.1f}\" y=\"12\""
                     f" text-anchor=\"end\">{limit:.1f} {unit} may be used</text>")
    return "".join([*parts, "</svg>"])


def short(words: str, most: int = 46) -> str:
    """Words that fit beside a bar."""
    return words if len(words) <= most else words[:most - 3] + "..."


def front(question: Question, plan: Plan) -> str:
    """Points of the layouts of which none other has less memory and a shorter step."""
    height, points = 360, plan.front
    slowest, fullest = max(point[0] for point in points), question.gib
    quickest = min(point[0] for point in points)
    span = (slowest - quickest) or quickest
    floor = height - 40
    parts = [
        f"<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">",
        f"<line class=\"axis\" x1=\"60\" x2=\"{WIDTH - 20}\" y1=\"{floor}\" y2=\"{floor}\"/>",
        f"<line class=\"axis\" x1=\"60\" x2=\"60\" y1=\"10\" y2=\"{floor}\"/>",
        f"<text x=\"{WIDTH - 20}\" y=\"{height - 8}\" text-anchor=\"end\">",
        f"seconds of a step, at least: {quickest:.3g} to {slowest:.3g}</text>",
        f"<text x=\"66\" y=\"22\">GiB of the fullest rank, up to {fullest:.1f}</text>"]
    for seconds, gib, layout in points:
        x = 70 + (WIDTH - 110) * (seconds - quickest) / span
        y = floor - (height - 60) * gib / fullest
        parts.append(f"<circle cx=\"{x:.1f}\" cy=\"{y:.1f}\" r=\"5\" fill=\"var(--a)\"><title>"
                     f"{safe(layout_words(layout))}: {seconds:.3f} s, {gib:.1f} GiB</title>"
                     "</circle>")
    return "".join([*parts, "</svg>"])
