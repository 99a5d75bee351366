"""Pictures of the pages, drawn from real schedules, shapes and result files.

`picture: NAME KIND WORDS` draws docs/pictures/NAME.svg. A kind is a function of its words; it
returns a figure or a whole SVG, and the alt text.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from bench import results
from bench.training import config_of, take_step
from docs.build.blocks import Block
from mpipar import cli
from mpipar import ops as ops_module
from mpipar.comm.grid import AXES, Grid, token_pieces
from mpipar.comm.record import Recorder
from mpipar.commands.schedule import cost_words, costs_of, title
from mpipar.errors import UserError
from mpipar.interconnect.cases import shares
from mpipar.ops.shape_array import labels_of
from mpipar.pipeline.schedules.catalog import SCHEDULES, make_schedule, schedule_problems
from mpipar.run.console.tables import nbytes
from mpipar.study.explain.predict import fullest, predict
from mpipar.study.schedules.draw import svg
from mpipar.study.schedules.simulate import simulate

FOLDER = Path("docs/pictures")
MIB, GIB = 2**20, 2**30
WIDE = 7.4  # inches
MARKERS = "os^vD*Pph<>Xd"
PLAIN, WAIT, INK = "#e4e7eb", "#d9452b", "#1d232b"
RANKS = ("#8fb8e8", "#f2c078", "#9ed29a", "#e5a3c8", "#c5b3e6", "#8fd6d2", "#e8a590", "#cfd27a")
KNOWN = {"idle": PLAIN, "waits for the last rank": WAIT}  # colours of kinds that always have one
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


# --- what several kinds share


class Bar(NamedTuple):
    """A part of a lane. kind: gives its colour, and stands in the legend. words: written in it."""

    lane: str
    start: float
    end: float
    kind: str
    words: str = ""


def sheet(head: str, high: float, across: str = "", up: str = "") -> Any:
    """Return axes with a title and names for both directions. high: inches."""
    axes = Figure(figsize=(WIDE, high), layout="constrained").subplots()
    axes.set_title(head)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return axes


def lanes(head: str, bars: Iterable[Bar], across: str, notes: Mapping[str, str]) -> Any:
    """Return axes with a lane for each name, from above. notes: what stands at a lane's end."""
    bars = list(bars)
    rows = {name: row for row, name in enumerate(dict.fromkeys(bar.lane for bar in bars))}
    kinds = list(dict.fromkeys(bar.kind for bar in bars))
    colours = {kind: KNOWN.get(kind, f"C{number}") for number, kind in enumerate(kinds)}
    axes = sheet(head, 1.1 + 0.27 * len(rows), across)
    for bar in bars:
        axes.barh(
            rows[bar.lane],
            bar.end - bar.start,
            left=bar.start,
            color=colours[bar.kind],
            edgecolor="white",
            linewidth=0.4,
        )
        axes.text(
            (bar.start + bar.end) / 2, rows[bar.lane], bar.words, ha="center", va="center", size=7
        )
    for name, words in notes.items():
        end = max(bar.end for bar in bars if bar.lane == name)
        axes.text(end, rows[name], f"  {words}", va="center", size=8)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    legend = [Patch(color=colours[kind], label=kind) for kind in kinds]
    axes.figure.legend(handles=legend, loc="outside lower left", ncols=6)
    return axes


def board(head: str, width: float, height: float) -> Any:
    """Return axes without lines for boxes and texts, in points from the upper left corner."""
    axes = Figure(figsize=(width / 72, height / 72)).add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.text(8, 16, head, weight="bold")
    return axes


def box(axes: Any, corner: tuple, size: tuple, colour: str, words: str = "") -> None:
    """Draw a box with words in its middle."""
    axes.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor="white"))
    middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2
    axes.text(*middle, words, ha="center", va="center")


def arrow(axes: Any, start: tuple, end: tuple) -> None:
    """Draw an arrow."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK})


def barrier(axes: Any, x: float, top: float, high: float, record: Any) -> str:
    """Draw a bar where ranks wait; return its operation and bytes, which stand below it."""
    words = f"{record.operation.replace('_', '-')} {nbytes(record.payload_bytes)}"
    box(axes, (x, top), (6, high), WAIT)
    axes.text(x + 3, top + high + 4, words.replace(" ", "\n", 1), ha="center", va="top", size=8)
    return words


def layout_words(config: Any) -> str:
    """Return a layout in words, as in `dp 2 x pp 2`."""
    sizes = {axis: getattr(config.grid, axis) for axis in AXES}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


def measured(name: str, bench: str) -> tuple[dict, str]:
    """Return the result file of a program, and where it was measured. Raises DataError."""
    found = results.read(results.ROOT / name, bench)
    machine = found["machine"]
    return found, f"measured {machine['date']} on {machine['cores']} cores: {machine['cpu']}"


class Look(NamedTuple):
    """FLOPs so far, the pass that has just ended or "", live bytes by label, calls posted."""

    flops: int
    name: str
    live: dict[str, int]
    posted: int


class Watching(Recorder):
    """A recorder that looks at each change of the FLOPs done, and at the end of each pass."""

    def __init__(self, config: Any):
        super().__init__(capacity=1 << 20)
        self.ops, self.seen = ops_module.shapes_for(config.run, self), []
        count = self.ops._count

        def count_and_look(flops: int) -> None:
            count(flops)
            self.look()

        self.ops._count = count_and_look

    def look(self, name: str = "") -> None:
        """Record what is alive now."""
        self.seen.append(Look(sum(self.ops.flops.values()), name, self.ops.live, len(self.entries)))

    def span(self, kind: str, start: int, stage: int = -1, mb: int = -1, end: Any = None) -> None:
        """Record what is alive after a pass."""
        super().span(kind, start, stage, mb, end)
        self.look(f"{kind}{mb}" if mb >= 0 else kind)


def watch(config: Any) -> Watching:
    """Run a step of rank 0 on shapes, watched."""
    recorder = Watching(config)
    worker = take_step(config, 0, recorder, recorder.ops)
    recorder.look("end")
    del worker  # until here, what it holds was alive
    return recorder


# --- kinds with an axis of time, tokens, bytes or rows


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


def one_barrier(name: str) -> Picture:
    """`barrier FILE`: arrival, wait and transfer of each rank, as `docs.build measure` kept it."""
    found, where = measured(name, "docs.build measure")
    parts = found["barrier"]["parts"]
    bars = [Bar(f"rank {rank}", start, end, what) for rank, what, start, end in parts]
    waits = ", ".join(
        f"rank {rank} waits {end - start:.2f} ms"
        for rank, what, start, end in parts
        if what.startswith("waits")
    )
    head = f"One barrier, {found['barrier']['name']}"
    axes = lanes(head, bars, f"ms, {where}", {})
    return axes.figure, f"{head}. The last rank ends all waits: {waits}"


def tokens(ranks: str, length: str) -> Picture:
    """`tokens RANKS LENGTH`: which rank holds which tokens of a row, and its work."""
    size, bars, notes, alt = int(ranks), [], {}, []
    for method, words in (("ring", "two pieces (ring, gather)"), ("ulysses", "one run (ulysses)")):
        counts = []
        for rank in range(size):
            lane = f"{words}, rank {rank}"
            pieces = token_pieces(int(length), method, size, rank)
            bars += [Bar(lane, one.start, one.stop, f"rank {rank}") for one in pieces]
            # Pairs of a query in these pieces with a key at or before its position.
            ends = [(one.start, one.stop) for one in pieces]
            counts.append(sum((b * (b + 1) - a * (a + 1)) // 2 for a, b in ends))
            notes[lane] = f"{counts[-1]:,} pairs"
        alt.append(f"{words}: {min(counts):,} to {max(counts):,} pairs")
    head = "Who holds which tokens of a row, and how many pairs it multiplies"
    return lanes(head, bars, "token", notes).figure, (
        f"Tokens of a row of {int(length):,} on {size} ranks. {'. '.join(alt)}"
    )


def memory_bars(*words: str) -> Picture:
    """`bars LIMIT [LAYOUT] [flags of explain]`: memory of the fullest rank, and a limit in GiB.

    A layout may be `pp=4,tp=8+sp` for --sequence-parallel.
    """
    first = next(place for place, word in enumerate(words) if word.startswith("--"))
    limit, found, notes, bars = float(words[0]), {}, {}, []
    for layout in words[1:first]:
        sizes, _, more = layout.partition("+")
        extra = ["--sequence-parallel"] * (more == "sp")
        flags = ["--layout", sizes, *extra, *words[first:]]
        found[layout] = fullest(config_of(flags)).peak_bytes
    for layout, own in found.items():
        done = 0.0
        for label in filter(own.get, labels_of(found.values())):
            bars.append(Bar(layout, done / GIB, (done + own[label]) / GIB, label))
            done += own[label]
        notes[layout] = nbytes(done)
    axes = lanes("Memory of the fullest rank, by layout", bars, "GiB", notes)
    axes.axvline(limit, color=WAIT, linestyle="--")
    return axes.figure, (
        f"Memory of the fullest rank as bars: {'; '.join(map(' '.join, notes.items()))};"
        f" the device has {limit:g} GiB"
    )


def buckets(*words: str) -> Picture:
    """`buckets [flags of explain]`: gradient all-reduces in flight during the backward pass.

    From a step of rank 0 on shapes, where the FLOPs of the products done so far stand in for time.
    """
    config = config_of(list(words))
    step = watch(config)
    passes = [(look.flops, look.name) for look in step.seen if look.name]
    ends = [(0, ""), *passes]
    start = max(flops for flops, name in passes if name.startswith("F"))
    bars = [
        Bar("passes", max(before, start) * 1e-9, flops * 1e-9, "rank 0 computes", name)
        for (before, _), (flops, name) in pairwise(ends)
        if flops > max(before, start)
    ]
    sums = [
        (place, one)
        for place, one in enumerate(step.records)
        if one.name in ("grads.bucket", "grads.late")
    ]
    end, notes = passes[-1][0], {}
    for number, (place, one) in enumerate(sums):
        posted = max(look.flops for look in step.seen if look.posted <= place)
        lane = f"bucket {number}"
        bars.append(Bar(lane, posted * 1e-9, end * 1e-9, "sum of a bucket may travel"))
        notes[lane] = nbytes(one.payload_bytes)
    axes = lanes(
        f"{layout_words(config)}: gradients travel while the backward pass continues",
        bars,
        "GFLOP of the step done; at the dashed line rank 0 waits for all sums",
        notes,
    )
    axes.axvline(end * 1e-9, color=WAIT, linestyle="--")
    return axes.figure, (
        f"{len(sums)} buckets of gradients are posted one after the other during the backward"
        " pass, and waited for at its end"
    )


def rows(ranks: str, experts: str, per_rank: str) -> Picture:
    """`rows RANKS EXPERTS TOKENS`: rows that ranks get for their experts, by routing."""
    size, per_token, bars, notes, alt = int(ranks), 2, [], {}, []
    for routing in ("uniform", "zipf", "adversarial"):
        parts = [
            int(per_rank)
            * per_token
            * shares(routing, int(experts), rank, size).reshape(size, -1).sum(axis=1)
            for rank in range(size)
        ]
        ends = np.cumsum(np.rint([np.zeros(size), *parts]), axis=0)
        for receiver in range(size):
            lane = f"{routing}, rank {receiver}"
            notes[lane] = f"{ends[-1, receiver]:.0f} rows"
            bars += [
                Bar(lane, start, end, f"from rank {rank}")
                for rank, (start, end) in enumerate(pairwise(ends[:, receiver]))
            ]
        alt.append(f"{routing}: {ends[-1].min():.0f} to {ends[-1].max():.0f} rows")
    head = f"Rows that each rank gets ({per_rank} tokens each, {per_token} of {experts} experts)"
    return lanes(head, bars, "rows", notes).figure, f"Rows that {size} ranks get. {'; '.join(alt)}"


# --- kinds with two axes


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
    found, where = measured(name, "bench.tiles")
    peak, memory = found["machine"]["blas_gflops"], found["machine"]["copy_gbs"]
    axes = sheet(
        f"The product ladder under the roofs of a machine,\n{where}",
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


def memory(*words: str) -> Picture:
    """`memory [flags of explain]`: what rank 0 holds in the course of a step.

    The step is the real one, run without numbers; the FLOPs of the products done so far stand in
    for time.
    """
    config = config_of(list(words))
    seen = watch(config).seen
    held = {
        label: [look.live.get(label, 0) for look in seen]
        for label in labels_of(look.live for look in seen)
    }
    held = {label: sizes for label, sizes in held.items() if any(sizes)}
    axes = sheet(
        f"Memory of rank 0 in one step: {layout_words(config)}",
        3.4,
        "passes; their widths are the FLOPs of products",
        "MiB",
    )
    work, sizes = [look.flops for look in seen], np.array([*held.values()])
    axes.stackplot(work, sizes / MIB, labels=held)
    ends = [(0, ""), *((look.flops, look.name) for look in seen if look.name)]
    middles = {
        (before + flops) / 2: name
        for (before, _), (flops, name) in pairwise(ends)
        if flops > before
    }
    axes.set_xticks(list(middles), middles.values())
    axes.margins(x=0)
    axes.figure.legend(loc="outside right upper", reverse=True)
    alt = ", ".join(f"{label} {nbytes(max(own))}" for label, own in held.items())
    return axes.figure, (
        "Memory of a rank as stacked areas over the passes of one step. At most:"
        f" {alt}; together {nbytes(sizes.sum(axis=0).max())}"
    )


# --- kinds made of boxes


LAYERS = {
    "norm1": "norm",
    "attn.qkv": "q, k, v",
    "attn": "attention",
    "attn.proj": "projection",
    "norm2": "norm",
    "ffn.up": "up",
    "ffn.down": "down",
}


def chain(*words: str) -> Picture:
    """`chain [flags of explain]`: a block as a chain of layers, with the barriers of both
    directions, whose bytes come from a step of rank 0 on shapes.
    """
    config, alt = config_of(list(words)), []
    records = [
        one
        for one in predict(config, 0).recorder.records
        if one.name.startswith("block0.") and one.mb == 0 and one.phase in ("F", "I", "B")
    ]
    axes = board(f"One block of one microbatch on {layout_words(config)}", 860, 250)
    axes.text(8, 36, "blue: each rank has its part; grey: every rank does all; red: barrier")
    for way, y in (("forward", 66), ("backward", 166)):
        forward = way == "forward"
        axes.text(8, y + 26, way)
        found = {
            one.name.removeprefix("block0."): one
            for one in records
            if (one.phase == "F") == forward
        }
        for place, (name, text) in enumerate(LAYERS.items()):
            x, whole = 70 + 108 * place, name.startswith("norm")  # no rank has a part of a norm
            box(axes, (x, y), (80, 42), PLAIN if whole else RANKS[0], text)
            if place + 1 < len(LAYERS):
                ends = [(x + 80, y + 21), (x + 108, y + 21)]
                arrow(axes, *(ends if forward else ends[::-1]))
            if name in found:
                at = x + 91 if forward else x - 17
                alt.append(f"{way} block0.{name} {barrier(axes, at, y - 8, 58, found[name])}")
    return axes.figure, f"A block as a chain of layers with {len(alt)} barriers: {'; '.join(alt)}"


SENT = {
    "dp": "sums of gradients",
    "pp": "activations and their gradients",
    "cp": "keys and values",
    "tp": "barriers inside layers",
}


def grid(*words: str) -> Picture:
    """`grid [flags of explain]`: the ranks of a layout, and the bytes of each axis between them."""
    config = config_of(list(words))
    steps = [predict(config, rank) for rank in range(config.grid.num_ranks)]
    grids = [Grid.of(config.grid, step.world_rank) for step in steps]
    most = dict.fromkeys(AXES, 0)
    for step in steps:
        sent = {axis: sums.wire_bytes for (axis,), sums in step.recorder.totals("axis").items()}
        sent["dp"] = sent.get("dp", 0) + sent.pop("data", 0)  # sums over data ranks
        most = {axis: max(size, sent.get(axis, 0)) for axis, size in most.items()}
    axes_used = [axis for axis in AXES if getattr(config.grid, axis) > 1]
    alt = [f"{axis}: {SENT[axis]}, {nbytes(most[axis])}" for axis in axes_used]
    middles = [place_of(one) for one in grids]
    width, height = np.max(middles, axis=0) + np.array((60, 32))
    axes = board(f"{layout_words(config)}: bytes of a step", max(width, 420), height)
    for number, (axis, says) in enumerate(zip(axes_used, alt, strict=True)):
        colour, lines = RANKS[number], 12 * (most[axis] / max(most.values())) ** 0.5
        axes.plot([8, 30], [32 + 15 * number] * 2, color=colour, linewidth=max(1.5, lines))
        axes.text(38, 35 + 15 * number, says)
        for group in sorted({one.group(axis) for one in grids}):
            x, y = zip(*(middles[rank] for rank in group), strict=True)
            axes.plot(x, y, color=colour, linewidth=max(1.5, lines), zorder=0)
    for one, (x, y) in zip(grids, middles, strict=True):
        box(axes, (x - 46, y - 17), (92, 34), PLAIN, f"rank {one.world_rank}\n{one.describe()}")
    return axes.figure, (
        f"The ranks of {layout_words(config)} as boxes, joined along each axis. Most that a rank"
        f" sends in a step: {'; '.join(alt)}"
    )


def place_of(one: Grid) -> tuple[float, float]:
    """Return the middle of a rank: pp down, tp and cp across, dp into the depth."""
    inner, depth = (
        one.group_rank("cp") * one.size("tp") + one.group_rank("tp"),
        one.group_rank("dp"),
    )
    across, down = 120 + 104 * (one.size("dp") - 1), 66 + 58 * (one.size("dp") - 1)
    return 60 + across * inner + 104 * depth, 110 + down * one.group_rank("pp") + 58 * depth


KINDS: dict[str, Callable[..., Picture]] = {
    "timeline": timeline,
    "barrier": one_barrier,
    "tokens": tokens,
    "bars": memory_bars,
    "buckets": buckets,
    "rows": rows,
    "tradeoff": tradeoff,
    "roofline": roofline,
    "memory": memory,
    "chain": chain,
    "grid": grid,
}
