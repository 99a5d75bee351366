"""`bars LAYOUT [LAYOUT] [--memory GiB] [flags of explain]`: memory of the fullest rank, by layout.

A layout may be `pp=4,tp=8+sp` for --sequence-parallel.
"""

from __future__ import annotations

from bench.docs.pictures import shapes
from bench.docs.pictures.drawing import Drawing
from bench.docs.pictures.memory import COLOURS
from mpipar.commands.memory_limit import fullest
from mpipar.config.flags import Parser
from mpipar.console.tables import nbytes
from mpipar.ops.shape_array import labels_of

LEFT, WIDE, TOP, ROW, HIGH = 170, 480, 88, 34, 22
GIB = 1 << 30


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    layouts, parser = words[:first], Parser(prog="bars")
    parser.add_argument("--memory", type=float)
    args, flags = parser.parse_known_args(words[first:])
    found = {}
    for layout in layouts:
        sizes, _, more = layout.partition("+")
        extra = ["--sequence-parallel"] * (more == "sp")
        config = shapes.config_of(["--layout", sizes, *extra, *flags])
        found[layout] = fullest(config).peak_bytes
    limit = (args.memory or 0) * GIB
    scale = WIDE / max(limit, *(sum(one.values()) for one in found.values()))
    labels = [label for label in labels_of(found.values())
              if any(one.get(label) for one in found.values())]
    canvas, told = Drawing("Memory of the fullest rank, by layout", [
        (COLOURS.get(label, "r5"), label) for label in labels]), []
    for place, (layout, own) in enumerate(found.items()):
        x, y = float(LEFT), TOP + ROW * place
        canvas.text(LEFT - 8, y + 16, layout.replace("+sp", ", seq. parallel"), "", "end")
        for label in labels:
            width = own.get(label, 0) * scale
            canvas.rect(x, y, width, HIGH, COLOURS.get(label, "r5"),
                        tip=f"{label} {nbytes(own.get(label, 0))}")
            x += width
        total = nbytes(sum(own.values()))
        canvas.text(x + 6, y + 16, total, "small")
        told.append(f"{layout} {total}")
    if limit:
        x, bottom = LEFT + limit * scale, TOP + ROW * len(found)
        canvas.line(x, TOP - 8, x, bottom, "limit dashed", width=2)
        canvas.text(x, bottom + 16, f"{nbytes(limit)} of the device", "small", "middle")
        told.append(f"the device has {nbytes(limit)}")
    alt = f"Memory of the fullest rank as bars: {'; '.join(told)}"
    return canvas.svg("Memory by layout", alt), alt
