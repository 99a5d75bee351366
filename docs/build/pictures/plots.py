"""Pictures with two axes: schedules, products under a roofline, and memory over a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import log10
from pathlib import Path

from bench.training import config_of, context_of
from docs.build.pictures.shapes import layout_words, load, watch
from docs.build.pictures.svg import CHARACTER, Drawing
from mpipar import cli
from mpipar.commands.schedule import cost_words, costs_of
from mpipar.ops.shape_array import labels_of
from mpipar.pipeline.schedules.catalog import SCHEDULES, make_schedule, schedule_problems
from mpipar.run.console.tables import nbytes
from mpipar.study.schedules.simulate import simulate

ROW = 15  # between two names
PURPOSES = {"weights": "r0", "gradients": "r1", "optimizer": "r2", "stash": "r3", "buffers": "r4"}
Ticks = Iterable[tuple[float, str]]  # values and their labels


@dataclass(frozen=True)
class Plot:
    """The two axes of a canvas. x, y: a value's position as a share of the axis."""

    canvas: Drawing
    corner: tuple[float, float]
    size: tuple[float, float]
    x: Callable[[float], float]
    y: Callable[[float], float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of a point."""
        return (
            self.corner[0] + self.size[0] * self.x(x),
            self.corner[1] + self.size[1] * (1 - self.y(y)),
        )

    def ticks(self, across: Ticks, up: Ticks, title: str) -> None:
        """Draw values below and beside the plot, and the title of the axis below."""
        left, bottom = self.corner[0], self.corner[1] + self.size[1]
        for value, words in across:
            self.canvas.note(left + self.size[0] * self.x(value), bottom + 18, words)
        for value, words in up:
            self.canvas.note(left - 8, bottom - self.size[1] * self.y(value) + 4, words, "end")
        self.canvas.text(left + self.size[0] / 2, bottom + 38, title, "soft", "middle")

    def axes(self, more: float = 0) -> None:
        """Draw lines at the left and the bottom; the latter is `more` longer."""
        (left, top), (wide, high) = self.corner, self.size
        self.canvas.line((left, top + high), (left + wide + more, top + high), "ink")
        self.canvas.line((left, top), (left, top + high), "ink")


def tradeoff(words: list[str], root: Path) -> tuple[str, str]:
    """`tradeoff --pp P --num-microbatches M [--costs F,I,W]`: bubble against stash, by schedule."""
    args = cli.context_of(None, "schedule", [*words, "--compare"]).args
    p, m, costs = args.pp, args.num_microbatches, costs_of(args)
    points: dict[tuple[float, float], list[str]] = {}
    for name in SCHEDULES:
        if not schedule_problems(name, p, m, None):
            schedule = make_schedule(name, p, m)
            v = schedule.num_stages // p
            found = simulate(schedule, costs.divided(v))
            stash, bubble = float(Fraction(max(found.peak_stash), v)), 100 * found.bubble_share
            points.setdefault((stash, round(bubble, 1)), []).append(name)
    most, worst = map(max, zip(*points, strict=True))
    canvas = Drawing(f"{p} workers, {m} microbatches: idle time against memory")
    canvas.text(0, 38, f"A worker's layers take {cost_words(costs)}.", "soft")
    plot = Plot(canvas, (56, 76), (600, 330), lambda x: x / most, lambda y: y / worst)
    plot.axes(60)
    plot.ticks(
        ((one, str(one)) for one in range(0, int(most) + 1, max(1, round(most / 8)))),
        ((one, f"{one} %") for one in range(0, int(worst) + 1, 10)),
        "microbatches stashed on the fullest worker",
    )
    canvas.text(0, 64, "bubble: share of the step that workers idle", "soft")
    taken = [(x - 7, x + 7, y) for x, y in (plot.at(*point) for point in points)]
    alt = []
    for (stash, bubble), names in sorted(points.items()):
        x, y = plot.at(stash, bubble)
        canvas.circle(x, y, 5, "tp", f"{', '.join(names)}: bubble {bubble} %, stash {stash:g}")
        label(plot, x, y, ", ".join(names), taken)
        alt.append(f"{', '.join(names)}: {bubble} % bubble, {stash:g} stashed")
    return canvas.svg(
        "Bubble against stash",
        (f"Bubble against stash on {p} workers with {m} microbatches. {'; '.join(alt)}"),
    )


def label(plot: Plot, x: float, y: float, words: str, taken: list) -> None:
    """Write names beside a point, in the nearest place that is still free.

    taken: (left, right, y) of each text drawn so far; the new ones are added.
    """
    width, ((left, top), (wide, high)) = CHARACTER * len(words), (plot.corner, plot.size)
    spans = [
        (side, side + width, y + step * sign * ROW)
        for step in range(9)
        for sign in (-1, 1)
        for side in (x + 9, x - 9 - width)
    ]
    span = next(
        (
            one
            for one in spans
            if left < one[0]
            and one[1] < left + wide + 90
            and top - 6 < one[2] < top + high - 4
            and all(
                abs(one[2] - other) >= ROW - 1 or one[1] < low or one[0] > end
                for low, end, other in taken
            )
        ),
        spans[0],
    )
    if span[2] != y:
        plot.canvas.line((x, y), (span[0] if span[0] > x else span[1], span[2]), "ink")
    near, anchor = (span[0], "start") if span[0] > x else (span[1], "end")
    plot.canvas.text(near, span[2] + 4, words, "small", anchor)
    taken.append(span)


def roofline(words: list[str], root: Path) -> tuple[str, str]:
    """`roofline FILE`: the rungs of the product ladder under the two roofs of this machine.

    The slanted roof is memory: bytes per second times FLOPs per byte. The flat one is BLAS.
    """
    found, measured = load(root, words, "bench.tiles")
    rows, machine = found["rows"], found["machine"]
    peak, memory = machine["blas_gflops"], machine["copy_gbs"]
    ridge = peak / memory
    low_x = min(0.1, *(row["flop_per_byte"] / 2 for row in rows))
    high_x = max(2 * ridge, *(2 * row["flop_per_byte"] for row in rows))
    high_y, low_y = 2 * peak, min(low_x * memory, *(row["gflops"] for row in rows)) / 2
    canvas = Drawing("The product ladder under the roofs of this machine")
    canvas.note(0, 38, measured, "start")
    plot = Plot(
        canvas,
        (64, 66),
        (620, 320),
        lambda x: log10(x / low_x) / log10(high_x / low_x),
        lambda y: log10(y / low_y) / log10(high_y / low_y),
    )
    plot.axes()
    powers = [(10.0**power, f"{10.0**power:g}") for power in range(-3, 5)]
    plot.ticks(
        (one for one in powers if low_x <= one[0] <= high_x),
        (one for one in powers if low_y <= one[0] <= high_y),
        "FLOPs for each byte that memory delivers",
    )
    canvas.text(72, 68, "GFLOP/s", "soft")
    canvas.line(plot.at(low_x, low_x * memory), plot.at(ridge, peak), "tp", width=2.5)
    canvas.line(plot.at(ridge, peak), plot.at(high_x, peak), "dp", width=2.5)
    x, y = plot.at(ridge, peak)
    canvas.text(x + 6, y - 8, f"BLAS {peak:.0f} GFLOP/s", "small")
    x, y = plot.at(ridge / 4, peak / 4)
    canvas.text(x - 8, y - 2, f"memory {memory:.1f} GB/s", "small", "end")
    for row in rows:
        x, y = plot.at(row["flop_per_byte"], row["gflops"])
        name = f"{row['product']}: {row['percent_of_blas']:.3g} % of BLAS"
        canvas.circle(x, y, 5, "wait", name)
        near, anchor = (x - 9, "end") if x + 9 + CHARACTER * len(name) > 684 else (x + 9, "start")
        below = 20 if row["gflops"] > 0.8 * peak else 4  # clear of the roof
        canvas.text(near, y + below, name, "small", anchor)
    alt = "; ".join(f"{row['product']} {row['gflops']:.3g} GFLOP/s" for row in rows)
    return canvas.svg(
        "Roofline of the product ladder",
        (f"Roofline: memory gives {memory:.1f} GB/s, BLAS {peak:.0f} GFLOP/s. {alt}"),
    )


def purposes_of(parts: Iterable[dict[str, int]]) -> list[str]:
    """Return the labels of memory that hold something in any of these {label: bytes}."""
    parts = list(parts)
    return [label for label in labels_of(parts) if any(one.get(label) for one in parts)]


def memory(words: list[str], root: Path) -> tuple[str, str]:
    """`memory [flags of explain] [--rank R]`: what a rank holds in the course of a step, on shapes.

    The step is the real one, run without numbers; the FLOPs of the products done so far stand in
    for time.
    """
    config, rank = config_of(words), context_of(words).args.rank or 0
    seen = watch(config, rank).seen
    labels = purposes_of(look.live for look in seen)
    most, work = max(sum(look.live.values()) for look in seen), seen[-1].flops
    canvas = Drawing(
        f"Memory of rank {rank} in one step: {layout_words(config)}",
        [(PURPOSES.get(label, "r5"), label) for label in labels],
    )
    plot = Plot(canvas, (82, 78), (600, 260), lambda x: x / work, lambda y: y / most)
    below, alt = [0] * len(seen), []
    for label in labels:
        above = [low + look.live.get(label, 0) for low, look in zip(below, seen, strict=True)]
        edges = [
            [plot.at(look.flops, size) for look, size in zip(seen, edge, strict=True)]
            for edge in (above, below)
        ]
        peak = nbytes(max(look.live.get(label, 0) for look in seen))
        canvas.area(
            [*edges[0], *reversed(edges[1])], PURPOSES.get(label, "r5"), f"{label}: at most {peak}"
        )
        alt.append(f"{label} {peak}")
        below = above
    plot.ticks(
        (),
        ((most * share, nbytes(most * share)) for share in (0, 0.5, 1)),
        "work done in this step (FLOPs of products)",
    )
    ends = [(0, ""), *((look.flops, look.name) for look in seen if look.name)]
    for (before, _), (flops, name) in pairwise(ends):
        if flops > before:
            (left, bottom), (right, _) = plot.at(before, 0), plot.at(flops, 0)
            canvas.line((right, bottom), (right, bottom + 6), "ink")
            if right - left > 8 * len(name):
                canvas.note((left + right) / 2, bottom + 17, name)
    return canvas.svg(
        "Memory over a step",
        (
            "Memory of a rank as stacked areas over the passes of one step. At most:"
            f" {', '.join(alt)}; together {nbytes(most)}"
        ),
    )
