"""Pictures of the pages, drawn from real schedules, shapes and result files.

`picture: NAME KIND WORDS` draws docs/pictures/NAME.svg. A kind is a function of its words; it
returns a figure or a whole SVG, and the alt text.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure

from bench import results
from bench.training import config_of
from docs.build.blocks import Block
from mpipar import cli
from mpipar.commands.schedule import cost_words, costs_of, title
from mpipar.errors import UserError
from mpipar.ops.shape_ops import labels_of
from mpipar.pipeline.schedules.catalog import SCHEDULES, make_schedule, schedule_problems
from mpipar.run.console.tables import nbytes
from mpipar.study.explain.predict import fullest
from mpipar.study.schedules.draw import svg
from mpipar.study.schedules.simulate import simulate

FOLDER = Path("docs/pictures")
GIB = 2**30
WIDE = 7.4  # inches
MARKERS = "os^vD*Pph<>Xd"
WAIT, INK = "#d9452b", "#1d232b"
RANKS = ("#8fb8e8", "#f2c078", "#9ed29a", "#e5a3c8", "#c5b3e6", "#8fd6d2", "#e8a590", "#cfd27a")
STYLE = {  # a light ground, also on a dark page; the same file from the same data
    "svg.fonttype": "none",
    "svg.hashsalt": "mpipar",
    "font.size": 9,
    "figure.facecolor": "#fafaf8",
    "axes.facecolor": "#fafaf8",
    "axes.prop_cycle": cycler(color=RANKS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
    "text.color": INK,
}
Picture = tuple[Figure | str, str]


def draw(block: Block) -> tuple[Path, str, str]:
    """Return (path in the repository, SVG, the line of the page) of a block. Raises PageError."""
    name, kind, *words = [*block.words.split(), ""]
    if kind not in KINDS:
        raise block.problem(f"use a name and one of the kinds {', '.join(KINDS)}")
    with mpl.rc_context(STYLE):
        try:
            figure, alt = KINDS[kind](*words[:-1])
        except (UserError, OSError, LookupError, TypeError, ValueError) as error:
            raise block.problem(f"{type(error).__name__}: {error}") from error
        if isinstance(figure, Figure):
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
            figure = file.getvalue()
    up = "../" * (len(block.page.parent.parts) - 1) if block.page.parent.parts else "docs/"
    return FOLDER / f"{name}.svg", figure, f"![{alt}]({up}pictures/{name}.svg)"


def sheet(head: str, high: float, across: str = "", up: str = "") -> Any:
    """Return axes with a title and names for both directions. high: inches."""
    axes = Figure(figsize=(WIDE, high), layout="constrained").subplots()
    axes.set_title(head)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return axes


# --- the kinds


def timeline(*words: str) -> Picture:
    """`timeline SCHEDULE --pp P ...`: what `mpipar schedule --svg -` draws from these flags."""
    args = cli.context_of(None, "schedule", list(words)).args
    schedule = make_schedule(args.name, args.pp, args.num_microbatches, args.chunks)
    found, name = simulate(schedule, costs_of(args)), title(schedule)
    least, most = (f"{100 * choose(found.busy_share):.1f}" for choose in (min, max))
    busy = least if least == most else f"{least} to {most}"
    return svg(found, name), (
        f"Timeline of {name}: a row for each worker, time to the right. Each worker computes {busy}"
        " % of the time; idle time is hatched"
    )


def memory_bars(*words: str) -> Picture:
    """`bars LIMIT [LAYOUT] [flags of explain]`: memory of the fullest rank, and a limit in GiB.

    A layout may be `pp=4,tp=8+sp` for --sequence-parallel.
    """
    first = next(place for place, word in enumerate(words) if word.startswith("--"))
    limit, found, totals = float(words[0]), {}, {}
    for layout in words[1:first]:
        sizes, _, more = layout.partition("+")
        extra = ["--sequence-parallel"] * (more == "sp")
        flags = ["--layout", sizes, *extra, *words[first:]]
        found[layout] = fullest(config_of(flags)).peak_bytes
    axes = sheet("Memory of the fullest rank, by layout", 1.1 + 0.27 * len(found), "GiB")
    ends = np.zeros(len(found))
    for label in labels_of(found.values()):
        parts = np.array([own.get(label, 0) / GIB for own in found.values()])
        axes.barh(list(found), parts, left=ends, label=label, edgecolor="white", linewidth=0.4)
        ends += parts
    for row, (layout, own) in enumerate(found.items()):
        totals[layout] = nbytes(sum(own.values()))
        axes.text(ends[row], row, f"  {totals[layout]}", va="center", size=8)
    axes.invert_yaxis()
    axes.figure.legend(loc="outside lower left", ncols=6)
    axes.axvline(limit, color=WAIT, linestyle="--")
    return axes.figure, (
        f"Memory of the fullest rank as bars: {'; '.join(map(' '.join, totals.items()))};"
        f" the device has {limit:g} GiB"
    )


def tradeoff(*words: str) -> Picture:
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
    axes = sheet(
        f"{p} workers, {m} microbatches;\na worker's layers take {cost_words(costs)}",
        3.4,
        "microbatches stashed on the fullest worker",
        "idle workers, % of the step",
    )
    for number, ((stash, bubble), names) in enumerate(sorted(points.items())):
        axes.plot(stash, bubble, MARKERS[number], color=INK, label=", ".join(names))
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.figure.legend(loc="outside right upper")
    alt = (
        f"{', '.join(names)}: {bubble} % bubble, {stash:g} stashed"
        for (stash, bubble), names in sorted(points.items())
    )
    return axes.figure, (
        f"Bubble against stash on {p} workers with {m} microbatches. {'; '.join(alt)}"
    )


def roofline(name: str) -> Picture:
    """`roofline FILE`: the rungs of the product ladder under the two roofs of a machine.

    The slanted roof is memory: bytes per second times FLOPs per byte. The flat one is BLAS.
    """
    found = results.read(results.ROOT / name, "bench.tiles")
    machine = found["machine"]
    peak, memory = machine["blas_gflops"], machine["copy_gbs"]
    axes = sheet(
        "The product ladder under the roofs of a machine,\n"
        f"measured {machine['date']} on {machine['cores']} cores: {machine['cpu']}",
        3.6,
        "FLOPs for each byte that memory delivers",
        "GFLOP/s",
    )
    intensities = [row["flop_per_byte"] for row in found["rows"]]
    x = np.geomspace(min(intensities) / 2, max(intensities) * 8)
    axes.loglog(
        x,
        np.minimum(peak, memory * x),
        label=f"memory {memory:.1f} GB/s, then BLAS {peak:.0f} GFLOP/s",
    )
    for row in found["rows"]:
        axes.plot(row["flop_per_byte"], row["gflops"], "o", color=WAIT)
        words = f"{row['product']}: {row['percent_of_blas']:.3g} % of BLAS"
        at = (row["flop_per_byte"], row["gflops"])
        axes.annotate(words, at, (7, -11), textcoords="offset points")
    axes.margins(y=0.15)
    axes.legend(loc="upper left")
    alt = "; ".join(f"{row['product']} {row['gflops']:.3g} GFLOP/s" for row in found["rows"])
    return axes.figure, f"Roofline: memory gives {memory:.1f} GB/s, BLAS {peak:.0f} GFLOP/s. {alt}"


KINDS: dict[str, Callable[..., Picture]] = {
    "timeline": timeline,
    "bars": memory_bars,
    "tradeoff": tradeoff,
    "roofline": roofline,
}
