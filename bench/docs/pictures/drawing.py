"""A drawing: boxes, texts and lines that become one SVG file, for light and dark pages alike.

Shapes have a class in place of a colour. `r0` to `r7` are the colours of ranks, `dp`, `pp`, `cp`
and `tp` those of axes. `idle` is hatched, `wait` and `transfer` are the parts of a barrier.
"""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

CHARACTER, BOLD = 6.8, 7.8  # width of a letter of 13 pixels
RIGHT = 700  # end of the lines of a legend
LIGHT = {
    "page": "#ffffff", "ink": "#1d232b", "soft": "#5d6774", "line": "#b9c0ca", "plain": "#e8ebef",
    "wait": "#d9452b", "transfer": "#8457b8", "ground": "#f0f0f0", "hatch": "#c4c4c4",
    "r0": "#8fb8e8", "r1": "#f2c078", "r2": "#9ed29a", "r3": "#e5a3c8", "r4": "#c5b3e6",
    "r5": "#8fd6d2", "r6": "#e8a590", "r7": "#cfd27a",
    "dp": "#217a4b", "pp": "#a0500a", "cp": "#8457b8", "tp": "#2a62b8", "limit": "#d9452b",
}
DARK = {
    "page": "#16191d", "ink": "#e3e7ee", "soft": "#9aa5b5", "line": "#4a525d", "plain": "#2a3038",
    "wait": "#ff7a5c", "transfer": "#b38ae0", "ground": "#24292f", "hatch": "#464d56",
    "r0": "#2f5f9a", "r1": "#8a5c12", "r2": "#2f7038", "r3": "#8b3c6b", "r4": "#5f4a94",
    "r5": "#1f6f6c", "r6": "#8d4530", "r7": "#6a6d1e",
    "dp": "#55bd86", "pp": "#f0a04b", "cp": "#b38ae0", "tp": "#6c9df0", "limit": "#ff7a5c",
}
FILLS = [name for name in LIGHT if name not in ("page", "ink", "soft", "line", "ground", "hatch")]
HATCH = ('<defs><pattern id="hatching" width="6" height="6" patternUnits="userSpaceOnUse" '
         'patternTransform="rotate(45)"><rect width="6" height="6" class="ground"/>'
         '<path d="M0 0V6" class="hatch"/></pattern>')
HEAD = ('<marker id="to-{0}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto" markerUnits="userSpaceOnUse">'
        '<path d="M0 0L8 4L0 8Z" class="{0}"/></marker>')


def colours(palette: dict[str, str]) -> str:
    """The rules of one theme."""
    fills = " ".join(f".{name} {{ fill: {palette[name]}; }}" for name in FILLS)
    strokes = " ".join(f".{name}-line {{ stroke: {palette[name]}; }}" for name in FILLS)
    return (f"svg {{ background: {palette['page']}; }} text {{ fill: {palette['ink']}; }} "
            f".soft {{ fill: {palette['soft']}; }} .ink {{ fill: {palette['ink']}; }} "
            f".ink-line {{ stroke: {palette['ink']}; }} .box {{ stroke: {palette['page']}; }} "
            f".axis-line {{ stroke: {palette['line']}; }} .ground {{ fill: {palette['ground']}; }} "
            f".hatch {{ stroke: {palette['hatch']}; stroke-width: 1.5; }} {fills} {strokes}")


STYLE = ("svg { font: 13px sans-serif; } .small { font-size: 11px; } .bold { font-weight: 600; } "
         ".idle { fill: url(#hatching); } .dashed { stroke-dasharray: 6 4; } "
         f"{colours(LIGHT)} @media (prefers-color-scheme: dark) {{ {colours(DARK)} }}")


class Drawing:
    """Elements in the order in which they are painted. Lengths are pixels of a picture that is
    shown at its full width. legend: (class, text) of each of its boxes.
    """

    def __init__(self, title: str, legend=()):
        self.parts: list[str] = []
        self.width = self.height = 0.0
        self.heads: set[str] = set()
        self.text(0, 18, title, "bold")
        self._add_legend(legend)

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, *,
             tip: str = "") -> None:
        """A box; tip: what a pointer over it shows."""
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                          f'height="{height:.1f}" class="box {kind}">{inside}</rect>')
        self._reach(x + width, y + height)

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Words; anchor: which end of them stands at x."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
                          f'class="{kind}">{escape(words)}</text>')
        share = {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor]
        letter = BOLD if "bold" in kind else CHARACTER
        self._reach(x + share * letter * len(words), y + 5)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, *, width: float = 1,
             arrow: bool = False) -> None:
        """A line of a colour, with a head at its end or without."""
        first, *more = kind.split()
        head = f' marker-end="url(#to-{first})"' if arrow else ""
        if arrow:
            self.heads.add(first)
        self.parts.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" fill="none" '
                          f'class="{" ".join([f"{first}-line", *more])}" '
                          f'stroke-width="{width:.1f}"{head}/>')
        self._reach(max(x1, x2), max(y1, y2))

    def circle(self, x: float, y: float, radius: float, kind: str, tip: str = "") -> None:
        """A point of a diagram."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{kind}">'
                          f"<title>{escape(tip)}</title></circle>")
        self._reach(x + radius, y + radius)

    def area(self, points: list[tuple[float, float]], kind: str, tip: str = "") -> None:
        """A filled shape."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path d="M{path}Z" class="{kind}"><title>{escape(tip)}</title></path>')
        for x, y in points:
            self._reach(x, y)

    def _add_legend(self, entries) -> None:
        """Boxes of classes and their texts below the title, in lines."""
        x, y = 0.0, 44.0
        for kind, words in entries:
            if x and x + 20 + CHARACTER * len(words) > RIGHT:
                x, y = 0.0, y + 20
            self.rect(x, y - 11, 13, 13, kind)
            self.text(x + 18, y, words)
            x += 36 + CHARACTER * len(words)

    def svg(self, title: str, alt: str) -> str:
        """The file. title: what a pointer shows; alt: what a reader who cannot see it hears."""
        width, height = self.width + 12, self.height + 10
        heads = "".join(HEAD.format(name) for name in sorted(self.heads))
        size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
        label = f'role="img" aria-label={quoteattr(alt)}'
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>',
            f"<title>{escape(title)}</title><desc>{escape(alt)}</desc>",
            f"<style>{STYLE}</style>{HATCH}{heads}</defs>",
            *self.parts, "</svg>", ""])
