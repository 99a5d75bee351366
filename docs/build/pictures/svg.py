"""A drawing: boxes, texts and lines that become one SVG file, for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

CHARACTER, BOLD = 6.8, 7.8  # width of a letter of 13 pixels
RIGHT = 700  # end of the lines of a legend
COLOURS = {  # on a light page, and on a dark one
    "page": ("#ffffff", "#16191d"),
    "ink": ("#1d232b", "#e3e7ee"),
    "soft": ("#5d6774", "#9aa5b5"),
    "ground": ("#f0f0f0", "#24292f"),
    "hatch": ("#c4c4c4", "#464d56"),
}
FILLS = {
    "plain": ("#e8ebef", "#2a3038"),
    "wait": ("#d9452b", "#ff7a5c"),
    "transfer": ("#8457b8", "#b38ae0"),
    "limit": ("#d9452b", "#ff7a5c"),
    "r0": ("#8fb8e8", "#2f5f9a"),
    "r1": ("#f2c078", "#8a5c12"),
    "r2": ("#9ed29a", "#2f7038"),
    "r3": ("#e5a3c8", "#8b3c6b"),
    "r4": ("#c5b3e6", "#5f4a94"),
    "r5": ("#8fd6d2", "#1f6f6c"),
    "r6": ("#e8a590", "#8d4530"),
    "r7": ("#cfd27a", "#6a6d1e"),
    "dp": ("#217a4b", "#55bd86"),
    "pp": ("#a0500a", "#f0a04b"),
    "cp": ("#8457b8", "#b38ae0"),
    "tp": ("#2a62b8", "#6c9df0"),
}
HATCH = (
    '<defs><pattern id="hatching" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" class="ground"/>'
    '<path d="M0 0V6" class="hatch"/></pattern>'
)
HEAD = (
    '<marker id="to-{0}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto" markerUnits="userSpaceOnUse">'
    '<path d="M0 0L8 4L0 8Z" class="{0}"/></marker>'
)


def colours(theme: int) -> str:
    """Return the CSS rules of one theme: 0 light, 1 dark."""
    page, ink, soft, ground, hatch = (pair[theme] for pair in COLOURS.values())
    fills = " ".join(
        f".{name} {{ fill: {pair[theme]}; }} .{name}-line {{ stroke: {pair[theme]}; }}"
        for name, pair in FILLS.items()
    )
    return (
        f"svg {{ background: {page}; }} text, .ink {{ fill: {ink}; }} "
        f".soft {{ fill: {soft}; }} .ink-line {{ stroke: {ink}; }} .box {{ stroke: {page}; }} "
        f".ground {{ fill: {ground}; }} .hatch {{ stroke: {hatch}; stroke-width: 1.5; }} "
        f"{fills}"
    )


STYLE = (
    "svg { font: 13px sans-serif; } .small { font-size: 11px; } .bold { font-weight: 600; } "
    ".idle { fill: url(#hatching); } .dashed { stroke-dasharray: 6 4; } "
    f"{colours(0)} @media (prefers-color-scheme: dark) {{ {colours(1)} }}"
)


class Drawing:
    """Elements in the order in which they are painted. Lengths are pixels of a picture that is
    shown at its full width. legend: (class, text) of each of its boxes.
    """

    def __init__(self, title: str, legend: Iterable[tuple[str, str]] = ()):
        self.parts: list[str] = []
        self.width = self.height = 0.0
        self.text(0, 18, title, "bold")
        x, y = 0.0, 44.0
        for kind, words in legend:
            if x and x + 20 + CHARACTER * len(words) > RIGHT:
                x, y = 0.0, y + 20
            self.rect(x, y - 11, 13, 13, kind)
            self.text(x + 18, y, words)
            x += 36 + CHARACTER * len(words)

    def _add(self, element: str, x: float, y: float, tip: str = "") -> None:
        """Add an element that extends to (x, y); tip: its tooltip."""
        inside = f"><title>{escape(tip)}</title></{element.split(maxsplit=1)[0]}>" if tip else "/>"
        self.parts.append(f"<{element}{inside}")
        self.width, self.height = max(self.width, x), max(self.height, y)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        *,
        tip: str = "",
        words: str = "",
        style: str = "",
    ) -> None:
        """Draw a box, with words in its middle."""
        self._add(
            f'rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'class="box {kind}"',
            x + width,
            y + height,
            tip,
        )
        if words:
            self.text(
                x + width / 2, y + height / 2 + 5 - ("small" in style), words, style, "middle"
            )

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Write words; anchor: which end of them is at x."""
        share = {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor]
        letter = BOLD if "bold" in kind else CHARACTER
        place = f'text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"'
        self._add(place, x + share * letter * len(words), y + 5)
        self.parts[-1] = f"<{place}>{escape(words)}</text>"

    def note(self, x: float, y: float, words: str, anchor: str = "middle") -> None:
        """Write a text in a softer colour."""
        self.text(x, y, words, "soft small", anchor)

    def line(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        kind: str,
        *,
        width: float = 1,
        arrow: bool = False,
    ) -> None:
        """Draw a coloured line, with an arrowhead at its end if `arrow`."""
        (x1, y1), (x2, y2), (first, *more) = start, end, kind.split()
        head = f' marker-end="url(#to-{first})"' if arrow else ""
        self._add(
            f'path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" fill="none" '
            f'class="{" ".join([f"{first}-line", *more])}" stroke-width="{width:.1f}"{head}',
            max(x1, x2),
            max(y1, y2),
        )

    def circle(self, x: float, y: float, radius: float, kind: str, tip: str) -> None:
        """Draw a point of a diagram."""
        self._add(
            f'circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{kind}"',
            x + radius,
            y + radius,
            tip,
        )

    def area(self, points: list[tuple[float, float]], kind: str, tip: str) -> None:
        """Draw a filled shape."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._add(f'path d="M{path}Z" class="{kind}"', *map(max, zip(*points, strict=True)), tip)

    def svg(self, title: str, alt: str) -> tuple[str, str]:
        """Return the SVG file and `alt`. title: its tooltip; alt: what screen readers read."""
        width, height, body = self.width + 12, self.height + 10, "\n".join(self.parts)
        heads = "".join(HEAD.format(name) for name in ("ink", *FILLS) if f"(#to-{name})" in body)
        size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
            f"aria-label={quoteattr(alt)}>\n"
            f"<title>{escape(title)}</title><desc>{escape(alt)}</desc>\n"
            f"<style>{STYLE}</style>{HATCH}{heads}</defs>\n{body}\n</svg>\n"
        ), alt
