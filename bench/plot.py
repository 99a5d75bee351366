"""Draws a benchmark's rows as SVG and PNG pictures (needs the extra `plot`).

    python -m bench.plot FILE.jsonl --out FOLDER

FOLDER/index.html shows all of them on one page. Each operation has four pictures: time by size,
bandwidth by size, the distribution of the samples of each size, and, for the largest size, how long
after the first rank each rank left each iteration. `pairs` has a matrix.

Bars show the 95 % confidence interval of the median. Points are not joined, because nothing was
measured between them.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import numpy as np

from bench.interconnect import records
from bench.interconnect.cases import COMM
from bench.interconnect.noise import Noise, detours_us
from bench.interconnect.statistics import times_us
from bench.program import Program
from bench.table import title
from mpipar.console import output
from mpipar.console.tables import nbytes
from mpipar.errors import EXIT_OK, DataError, EnvironmentProblem, OutputError

INCHES = (7.0, 4.5)
MOST_CURVES = 6  # sizes in one picture of distributions
MARKS = "osD^v"
USUAL = {"dtype": "float32", "sync": "barrier"}  # all other values become part of a file's name
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.4 sans-serif; margin: 1.5em; }}
section {{ display: flex; flex-wrap: wrap; gap: 0.5em; }}
h2 {{ font-size: 1em; width: 100%; margin: 1.5em 0 0; }}
img {{ width: 34em; max-width: 100%; background: white; }}
</style>
<h1>{title}</h1>
{sections}
</html>
"""


def pyplot():
    """Return matplotlib's pyplot, set to work without a display. Raises EnvironmentProblem."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise EnvironmentProblem("pictures need matplotlib: pip install '.[plot]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def by_picture(rows) -> dict[str, list[dict]]:
    """Return the rows that share a picture, by its file name: one operation of one group."""
    found: dict = {}
    for row in rows:
        parts = [row["case"]]
        if not row["case"].startswith("pairs "):
            parts += [row["axis"], row["mode"], "ranks", *map(str, row["ranks"])]
        parts += [row["transport"], row["buffers"]]
        parts += [row[name] for name, usual in USUAL.items() if row[name] != usual]
        name = re.sub(r"[^a-z0-9]+", "-", " ".join(filter(None, parts)).lower())
        found.setdefault(name, []).append(row)
    return found


def by_via(rows) -> dict[str, list[dict]]:
    """Return the ways to run an operation, each with its rows by ascending size."""
    found: dict = {}
    for row in sorted(rows, key=lambda row: row["size_bytes"]):
        found.setdefault(row["via"], []).append(row)
    return found


def size_axis(axes) -> None:
    """Make x a logarithmic axis of sizes, labelled in binary units at powers of two."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, place: nbytes(size))
    axes.set_xlabel("size")


def draw_time(axes, rows) -> None:
    """Draw the median time by size."""
    for (via, own), mark in zip(by_via(rows).items(), MARKS, strict=False):
        middle = np.array([row["median_us"] for row in own])
        bars = np.array(
            [
                [row["median_us"] - row["low_us"] for row in own],
                [row["high_us"] - row["median_us"] for row in own],
            ]
        )
        axes.errorbar(
            [row["size_bytes"] for row in own],
            middle,
            bars,
            fmt=mark,
            label=via,
            markersize=4,
            capsize=2,
            linestyle="none",
        )
    size_axis(axes)
    axes.set(yscale="log", ylabel="time (us)")


def draw_bandwidth(axes, rows) -> None:
    """Draw algbw and busbw by size; times that include computing have none."""
    rated = [row for row in rows if row["algbw_GBps"]]
    for number, (via, own) in enumerate(by_via(rated).items()):
        sizes = [row["size_bytes"] for row in own]
        axes.plot(
            sizes,
            [row["algbw_GBps"] for row in own],
            MARKS[0],
            color=f"C{number}",
            markersize=4,
            label=f"{via}, algbw",
        )
        axes.plot(
            sizes,
            [row["busbw_GBps"] for row in own],
            MARKS[2],
            color=f"C{number}",
            markersize=4,
            fillstyle="none",
            label=f"{via}, busbw",
        )
    size_axis(axes)
    axes.set_ylabel("bandwidth (GB/s = 1e9 B/s)")
    axes.set_ylim(bottom=0)


def of_one_way(rows) -> list[dict]:
    """Return the rows through mpipar.comm, or else those of the first other way."""
    ways = by_via(rows)
    return ways.get(COMM) or next(iter(ways.values()))


def draw_distribution(axes, rows) -> None:
    """Draw the share of samples up to each time, of a few sizes in one way."""
    own = of_one_way(rows)
    sizes = sorted({row["size_bytes"] for row in own})
    chosen = {
        sizes[place] for place in np.linspace(0, len(sizes) - 1, MOST_CURVES).round().astype(int)
    }
    for size in sorted(chosen):
        samples = np.sort(
            np.concatenate([times_us(row) for row in own if row["size_bytes"] == size])
        )
        axes.step(
            samples, np.arange(1, len(samples) + 1) / len(samples), where="post", label=nbytes(size)
        )
    axes.set(
        xscale="log", xlabel=f"time (us), {own[0]['via']}", ylabel="share of samples", ylim=(0, 1)
    )


def draw_ranks(axes, rows) -> None:
    """Draw a cell for each rank and iteration, largest size: its delay after the first to leave."""
    own = of_one_way(rows)[-1]
    left = np.delete(np.array(own["left_ns"]), own["late_at"], axis=0)
    after_us = (left - left.min(axis=1, keepdims=True)).T / 1000
    picture = axes.imshow(
        after_us,
        cmap="viridis",
        aspect="auto",
        interpolation="nearest",
        vmax=np.percentile(after_us, 99),
    )  # one outlier must not hide the rest
    what = f"{nbytes(own['size_bytes'])}, {own['via']}"
    axes.figure.colorbar(picture, label=f"us after the first, {what}")
    axes.set(
        yticks=range(len(own["ranks"])),
        yticklabels=own["ranks"],
        xlabel="iteration",
        ylabel="world rank",
    )


def draw_pairs(axes, rows) -> None:
    """Draw a cell for each pair of ranks: us of latency or GB/s of bandwidth, launches' median."""
    value, unit = ("median_us", "us") if "latency" in rows[0]["case"] else ("algbw_GBps", "GB/s")
    own = of_one_way(rows)
    names = sorted({number for row in own for number in row["ranks"]})
    cells = np.full((len(names), len(names)), np.nan)
    for low, high in {tuple(row["ranks"]) for row in own}:
        middle = np.median([row[value] for row in own if row["ranks"] == [low, high]])
        i, j = names.index(low), names.index(high)
        cells[i, j] = cells[j, i] = middle
    picture = axes.imshow(cells, cmap="viridis")
    axes.figure.colorbar(picture, label=f"{unit}, {nbytes(own[0]['size_bytes'])}")
    axes.set(
        xticks=range(len(names)),
        yticks=range(len(names)),
        xticklabels=names,
        yticklabels=names,
        xlabel="world rank",
        ylabel="world rank",
    )


def draw_detours(axes, row) -> None:
    """Draw when each detour of a noise row began, and how long it was, by rank."""
    entered = np.array(row["entered_ns"])
    for place, rank in enumerate(row["ranks"]):
        axes.plot(
            (entered[:, place] - entered.min()) * 1e-9,
            detours_us(row)[:, place],
            ".",
            markersize=2,
            label=f"rank {rank}",
        )
    axes.set(yscale="log", ylim=(0.3, None), xlabel="time (s)", ylabel="detour (us)")


def pictures(rows):
    """Yield (file name, title, draw(axes)) of each picture."""
    for name, own in by_picture(rows).items():
        head = title(own[0]).removeprefix("# ")
        if own[0]["case"].startswith("pairs "):
            yield name, own[0]["case"], lambda axes, own=own: draw_pairs(axes, own)
            continue
        if own[0]["case"] == Noise.name:
            yield f"{name}-detours", head, lambda axes, own=own: draw_detours(axes, own[0])
            continue
        yield f"{name}-samples", head, lambda axes, own=own: draw_distribution(axes, own)
        yield f"{name}-late", head, lambda axes, own=own: draw_ranks(axes, own)
        if any(row["size_bytes"] for row in own):
            yield f"{name}-time", head, lambda axes, own=own: draw_time(axes, own)
            yield f"{name}-bandwidth", head, lambda axes, own=own: draw_bandwidth(axes, own)


def save(plt, folder: Path, name: str, heading: str, draw) -> None:
    """Save one picture as SVG and PNG. Raises OutputError."""
    figure, axes = plt.subplots(figsize=INCHES, layout="constrained")
    draw(axes)
    axes.set_title(heading, fontsize=8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    try:
        for kind in ("svg", "png"):
            figure.savefig(folder / f"{name}.{kind}", dpi=100)
    except OSError as error:
        raise OutputError(f"{error.filename}: {error.strerror}") from error
    plt.close(figure)


def index_page(title: str, drawn: list[tuple[str, str]]) -> str:
    """Return a page with a section per heading; drawn: (file name, heading) of each picture."""
    by_heading: dict = {}
    for name, heading in drawn:
        by_heading.setdefault(heading, []).append(name)
    sections = [
        f"<section><h2>{escape(heading)}</h2>\n"
        + "\n".join(
            f'<img src="{name}.svg" alt="{escape(heading)}: {name.rpartition("-")[2]}"'
            ' loading="lazy">'
            for name in names
        )
        + "\n</section>"
        for heading, names in by_heading.items()
    ]
    return PAGE.format(title=escape(title), sections="\n".join(sections))


def add_flags(parser) -> None:
    """Add the flags for the files and the folder."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="of bench.interconnect --json")
    parser.add_argument("--out", default="plots", metavar="FOLDER", help="for the pictures (plots)")


def draw_all(args, session) -> int:
    """Draw everything in the files; print the names, the index page last."""
    rows = records.rows_of(args.files, tell=True)
    if not rows:
        raise DataError(f"{', '.join(args.files)}: no rows to draw")
    plt, folder = pyplot(), Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--out {folder}: {error.strerror}") from error
    drawn = []
    for name, heading, draw in pictures(rows):
        save(plt, folder, name, heading, draw)
        print(folder / f"{name}.svg")
        drawn.append((name, heading))
    title = ", ".join(Path(file).name for file in args.files)
    output.write_text(folder / "index.html", index_page(title, drawn))
    print(folder / "index.html")
    return EXIT_OK


main = Program("plot", __doc__, draw_all, json=None, add=add_flags).started(__name__)
