"""A plan as one self-contained HTML page: memory and time of the best layouts, and their trade-off.

Widths follow the window, and every part of a picture has a tooltip with its number. The chosen
layout is marked. The page's parts are in the folder page/.
"""

from __future__ import annotations

import math
from html import escape
from importlib.resources import files

from mpipar.console import html
from mpipar.files.text import harmless
from mpipar.plan.footprint import GIB, Footprint
from mpipar.plan.report import PARTS, candidate_words, devices, layout_words
from mpipar.plan.search import Plan, Question

WIDTH, HEIGHT = 1000, 360  # of the trade-off picture, in its own units
LEFT, FLOOR = 70, HEIGHT - 44  # where its axes are
TICKS = 5  # of an axis, at most
COLOURS = [f"var(--{letter})" for letter in "abcdefghijkl"]  # of page/page.css


def page(question: Question, plan: Plan, model: str, answer: str) -> str:
    """Return the page. model: its name. answer: as it is printed. All text is escaped."""
    title = (
        f"{model}: {question.shape.parameters / 1e9:.2f} billion parameters on {devices(question)}"
    )
    parts = [section("The answer", f"<pre>{safe(answer)}</pre>")]
    if plan.best:
        words = [candidate_words(one) for one in plan.best]
        room = max(kind.gib for kind in question.kinds)
        memory = [[size / GIB for size in (*one.memory, one.memory.reserve)] for one in plan.best]
        parts[:0] = [
            section(
                "Seconds of a step",
                bars([list(one.step) for one in plan.best], list(PARTS.values()), words, "s"),
            ),
            section(
                f"Memory of the fullest rank, GiB ({room:.1f} usable)",
                bars(memory, [*Footprint._fields, "reserve"], words, "GiB", room),
            ),
            section("Memory against time: no layout has less of both", front(plan)),
        ]
    return html.build(
        files("mpipar.plan") / "page", ("page.js",), {"title": title}, CARDS="\n".join(parts)
    )


def safe(text: str) -> str:
    """Return text escaped for HTML."""
    return escape(harmless(text))


def section(title: str, body: str) -> str:
    """Return a card of the page."""
    return f'<section class="card"><h2>{safe(title)}</h2>{body}</section>'


def bars(
    rows: list[list[float]],
    names: list[str],
    words: list[str],
    unit: str,
    limit: float | None = None,
) -> str:
    """Return a legend, a stacked bar for each layout, and an axis; a line marks the limit."""
    used = [
        (place, name) for place, name in enumerate(names) if any(row[place] > 0 for row in rows)
    ]
    colours = dict(zip((name for _, name in used), COLOURS, strict=False))
    most = max(*(sum(row) for row in rows), limit or 0.0)
    spans = "".join(
        f'<span><i class="swatch" style="background:{colour}"></i>{safe(name)}</span>'
        for name, colour in colours.items()
    )
    end = f'<u style="left:{100 * limit / most:.2f}%"></u>' if limit else ""
    found = [f'<p class="legend">{spans}</p>']
    for number, (row, text) in enumerate(zip(rows, words, strict=True)):
        inside = "".join(
            f'<i style="width:{100 * row[place] / most:.2f}%;background:{colours[name]}"'
            f' title="{safe(name)}: {row[place]:.3g} {unit}"></i>'
            for place, name in used
            if row[place] > 0
        )
        found.append(
            f'<div class="row{" chosen" * (number == 0)}"><div class="label">'
            f'{safe(text)}</div><div class="bar">{inside}{end}</div>'
            f"<b>{sum(row):.3g}</b></div>"
        )
    marks = "".join(
        f'<span style="left:{100 * tick / most:.2f}%">{tick:g}</span>' for tick in ticks(0, most)
    )
    found.append(
        '<div class="row"><div class="label"></div><div class="bar">'
        f"{marks}</div><b>{unit}</b></div>"
    )
    return "".join(found)


def label(x: float, y: float, text: str, anchor: str) -> str:
    """Return a text in a picture."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from low to high, about TICKS of them."""
    raw = (high - low) / TICKS or high or 1.0
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * many for many in (1, 2, 5, 10) if unit * many >= raw)
    return [
        round(step * place, 12)
        for place in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]


def front(plan: Plan) -> str:
    """Draw the layouts that no other one beats in both memory and step time."""
    best = plan.best[0]
    points = [(one.step.total, one.memory.total / GIB, one) for one in (*plan.front, best)]
    slowest, quickest = max(point[0] for point in points), min(point[0] for point in points)
    span, fullest = (slowest - quickest) or quickest, max(point[1] for point in points)

    def x(seconds: float) -> float:
        return LEFT + 10 + (WIDTH - LEFT - 40) * (seconds - quickest) / span

    def y(gib: float) -> float:
        return FLOOR - (FLOOR - 40) * gib / fullest

    head = f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    found = [head, f'<path class="axis" fill="none" d="M{LEFT} 10V{FLOOR}H{WIDTH - 20}"/>']
    found += [
        label(x(tick), FLOOR + 18, f"{tick:g}", "middle") for tick in ticks(quickest, slowest)
    ]
    found += [label(LEFT - 8, y(tick) + 4, f"{tick:g}", "end") for tick in ticks(0, fullest)]
    found += [
        label(WIDTH - 20, HEIGHT - 6, "seconds of a step, at least", "end"),
        label(LEFT + 8, 20, "GiB of the fullest rank", "start"),
    ]
    for seconds, gib, one in points:
        chosen = one is best
        found.append(
            f'<circle cx="{x(seconds):.1f}" cy="{y(gib):.1f}" r="{8 if chosen else 5}"'
            f' fill="var(--{"limit" if chosen else "a"})"><title>{"chosen: " * chosen}'
            f"{safe(layout_words(one.layout))}: {seconds:.3f} s, {gib:.1f} GiB</title></circle>"
        )
    return "".join([*found, "</svg></div>"])
