"""`grid [flags of explain]`: the ranks of a layout, and the bytes of each axis between them."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

from bench.docs.pictures import shapes
from bench.docs.pictures.drawing import Drawing
from mpipar.comm.grid import AXES, Grid
from mpipar.console.tables import nbytes
from mpipar.plan.predict import predict

WIDE, HIGH, LEFT, TOP = 92, 40, 4, 76
ACROSS, DOWN = 74, 66  # between two boxes
SHIFT, DEPTH = 104, 62  # from a copy to the next one
WIDEST = 14  # pixels of the line with most bytes
WORDS = {"dp": "dp: sums of gradients", "pp": "pp: activations and their gradients",
         "cp": "cp: keys and values", "tp": "tp: barriers inside of layers"}


def place_of(grid: Grid) -> tuple[float, float]:
    """The corner of a rank: pp down, tp and cp across, dp into the depth where these are there."""
    inner, depth = grid.place("cp") * grid.size("tp") + grid.place("tp"), grid.place("dp")
    layers = grid.size("dp") - 1
    if grid.size("tp") * grid.size("cp") == 1:
        inner, depth, layers = grid.place("dp"), 0, 0
    x = LEFT + (WIDE + ACROSS + SHIFT * layers) * inner + SHIFT * depth
    return x, TOP + (HIGH + DOWN + DEPTH * layers) * grid.place("pp") + DEPTH * depth


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    config = shapes.config_of(words)
    steps = [predict(config, rank) for rank in range(config.grid.num_ranks)]
    grids = [Grid.of(config.grid, step.world_rank) for step in steps]
    most = {axis: max(bytes_of(step).get(axis, 0) for step in steps) for axis in AXES}
    axes = [axis for axis in AXES if getattr(config.grid, axis) > 1]
    told = [f"{WORDS[axis]}, {nbytes(most[axis])}" for axis in axes]
    canvas = Drawing(f"{shapes.layout_words(config)}: the width of a line is the bytes that a rank"
                     " sends in a step", zip(axes, told, strict=True))
    for axis in axes:
        width = max(1.5, WIDEST * sqrt(most[axis] / max(most.values())))
        for group in {grid.group(axis) for grid in grids}:
            for low, high in pairwise(group):
                (x1, y1), (x2, y2) = place_of(grids[low]), place_of(grids[high])
                middle = (WIDE / 2, HIGH / 2)
                canvas.line(x1 + middle[0], y1 + middle[1], x2 + middle[0], y2 + middle[1], axis,
                            width=width)
    for grid in grids:
        x, y = place_of(grid)
        canvas.rect(x, y, WIDE, HIGH, "plain", tip=grid.describe())
        canvas.text(x + WIDE / 2, y + 17, f"rank {grid.world_rank}", "bold", "middle")
        canvas.text(x + WIDE / 2, y + 32, grid.describe(), "soft small", "middle")
    alt = (f"The ranks of {shapes.layout_words(config)} as boxes, joined along each axis."
           f" Most that a rank sends in a step: {'; '.join(told)}")
    return canvas.svg(f"Bytes of a step by axis: {shapes.layout_words(config)}", alt), alt


def bytes_of(step) -> dict[str, int]:
    """{axis: bytes that a rank sends in a step}; sums over data ranks count as dp."""
    found: dict[str, int] = {}
    for (axis,), sums in step.recorder.totals("axis").items():
        name = "dp" if axis == "data" else axis
        found[name] = found.get(name, 0) + sums.wire_bytes
    return found
