"""One page with pictures of a result: it needs no network and no other files, and has two themes.

Bandwidth and latency against size, with the spread of the samples, and all ways of an all-reduce
beside each other. The pictures are SVG with the colours of all pages.
"""

import math
from html import escape
from importlib.resources import files

from mpipar.interconnect.files import Row
from mpipar.interconnect.screen import by_table, digits, short, title
from mpipar.run.console import html
from mpipar.run.console.tables import nbytes

WIDTH, HEIGHT, LEFT, BOTTOM, RIGHT, TOP = 560, 260, 58, 34, 28, 12
COLOURS = ("F", "W", "B", "axis-tp", "axis-pp", "opt", "wait")  # variables of the style sheet


class Axis:
    """A logarithmic axis from a value's pixel to another's."""

    def __init__(self, values: list[float], start: float, stop: float):
        positive = [value for value in values if value > 0] or [1.0]
        self.low, self.high = math.log(min(positive)), math.log(max(positive))
        self.start, self.stop = start, stop

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        span = self.high - self.low or 1.0
        share = (math.log(max(value, math.exp(self.low))) - self.low) / span
        return round(self.start + share * (self.stop - self.start), 1)

    def ticks(self, base: float) -> list[float]:
        """Return at most seven powers of a base on the axis."""
        first, last = (round(one / math.log(base), 6) for one in (self.low, self.high))
        powers = range(math.ceil(first), math.floor(last) + 1)
        return [base**power for power in powers[:: max(1, math.ceil(len(powers) / 7))]]


def chart(series: dict[str, list[tuple[float, float, float, float]]], unit: str) -> str:
    """Return a picture of lines. series: {name: (size, low, middle, high) of each point}."""
    points = [point for own in series.values() for point in own]
    across = Axis([point[0] for point in points], LEFT, WIDTH - RIGHT)
    up = Axis([value for point in points for value in point[1:]], HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(unit)} by size">']
    for value in up.ticks(10):
        y = up.at(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for value in across.ticks(2):
        text = nbytes(value).replace(".0 ", " ")
        x = across.at(value)
        parts.append(f'<text x="{x}" y="{HEIGHT - 12}" text-anchor="middle">{text}</text>')
    for (name, own), colour in zip(series.items(), COLOURS * len(series), strict=False):
        spread = [(p[0], p[1]) for p in own] + [(p[0], p[3]) for p in reversed(own)]
        area, line = (
            " ".join(f"{across.at(x)},{up.at(y)}" for x, y in some)
            for some in (spread, [(p[0], p[2]) for p in own])
        )
        style = f'style="--c:var(--{colour})"'
        parts.append(f'<polygon class="spread" points="{area}" {style}/>')
        parts.append(f'<polyline class="line" points="{line}" {style}/>')
        parts += [
            f'<circle class="dot" cx="{across.at(size)}" cy="{up.at(middle)}" r="2.6" {style}>'
            f"<title>{escape(name)}, {nbytes(size)}: {digits(middle)} {unit}</title></circle>"
            for size, _, middle, _ in own
        ]
    return "".join([*parts, "</svg>"])


def legend(names: list[str]) -> str:
    """Return the names of the lines with their colours."""
    spans = [
        f'<span><i class="swatch" style="background:var(--{colour})"></i>{escape(name)}</span>'
        for name, colour in zip(names, COLOURS * len(names), strict=False)
    ]
    return f'<div class="legend">{"".join(spans)}</div>'


def card(rows: list[Row]) -> str:
    """Return the pictures of one table: its times, and its rates if it has some."""
    own = [row for row in rows if row["size_bytes"]]
    if not own:
        return ""
    ways = {
        short(via): [row for row in own if row["via"] == via] for via in {r["via"]: 0 for r in own}
    }
    times = {
        way: [(r["size_bytes"], r["low_us"], r["median_us"], r["high_us"]) for r in some]
        for way, some in ways.items()
    }
    rates = {
        way: [
            (
                r["size_bytes"],
                *(r["busbw_GBps"] * middle / (us or 1.0) for us in (high, middle, low)),
            )
            for r, (_, low, middle, high) in zip(some, times[way], strict=True)
        ]
        for way, some in ways.items()
    }
    pictures = f"{chart(times, 'us')}{chart(rates, 'GB/s busbw')}"
    heads = "<p>time in us</p><p>bus bandwidth in GB/s</p>"
    return (
        f'<section class="card"><h2>{escape(own[0]["case"])}</h2>'
        f'<p class="soft">{escape(title(own[0])[2:])}</p>{legend(list(times))}'
        f'<div class="two">{heads}{pictures}</div></section>'
    )


def build(rows: list[Row], closing: list[str]) -> str:
    """Return the page of a result. closing: the six lines."""
    lines = f'<section class="card"><pre>{escape(chr(10).join(closing))}</pre></section>'
    data = {"title": "Interconnect", "subtitle": closing[0].partition(" ")[2].strip()}
    return html.build(
        files("mpipar.interconnect") / "page",
        ("page.js",),
        data,
        CARDS="".join([lines, *map(card, by_table(rows))]),
    )
