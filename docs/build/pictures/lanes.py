"""Pictures made of rows along one axis: time, tokens, bytes, or powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from pathlib import Path

import ml_dtypes
import numpy as np

from bench.training import config_of
from docs.build.pictures.plots import PURPOSES, purposes_of
from docs.build.pictures.shapes import arguments, layout_words, load_trace, watch
from docs.build.pictures.svg import Drawing
from mpipar import cli
from mpipar.comm.grid import token_pieces
from mpipar.commands.schedule import costs_of, title
from mpipar.config.flags import Parser
from mpipar.errors import DataError, UsageError
from mpipar.interconnect.cases import shares
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.run.console.tables import nbytes
from mpipar.study.explain.predict import fullest
from mpipar.study.schedules.draw import svg
from mpipar.study.schedules.simulate import simulate

Picture = tuple[str, str]  # SVG and alt text


@dataclass(frozen=True)
class Lanes:
    """Rows of boxes: value `first` of the axis is at x = left, and 1 is `scale` wide."""

    canvas: Drawing
    left: float
    scale: float
    high: float
    first: float = 0.0

    def at(self, value: float) -> float:
        """Return the x of a value."""
        return self.left + (value - self.first) * self.scale

    def box(self, y: float, start: float, end: float, kind: str, **more) -> None:
        """Draw a box from one value to another; more: see `Drawing.rect`."""
        self.canvas.rect(self.at(start), y, (end - start) * self.scale, self.high, kind, **more)


def timeline(words: list[str], root: Path) -> Picture:
    """`timeline SCHEDULE --pp P ...`: worker x time, with the flags of `mpipar schedule`.

    `--svg -` comes before `--animate`.
    """
    args = cli.context_of(None, "schedule", words).args
    found = simulate(
        make_schedule(args.name, args.pp, args.num_microbatches, args.chunks),
        costs_of(args),
    )
    shares = [100 * share for share in found.busy_share]
    busy = (
        f"{min(shares):.1f} %"
        if max(shares) - min(shares) < 0.05
        else (f"{min(shares):.1f} to {max(shares):.1f} %")
    )
    name = title(found.schedule)
    return svg(found, name, args.animate), (
        f"Timeline of {name}: a row for each worker, time to the right. Each worker computes {busy}"
        " of the time; idle time is hatched"
    )


def barrier(words: list[str], root: Path) -> Picture:
    """`barrier FILE`: arrival, wait and transfer of each rank at one barrier of a traced run."""
    trace, measured = load_trace(root, words)
    rows = [row for row in trace["rows"] if ": " in row["what"]]
    if not rows:
        raise DataError(f"{words[0]}: has no barrier of several ranks")
    name = rows[0]["what"].partition(": ")[2]
    end = max(row["end_ms"] for row in rows)
    lead = 0.15 * end  # shown before the first arrival and after the end
    met = max(row["end_ms"] for row in rows if row["what"].startswith("wait"))
    canvas = Drawing(
        f"One barrier, {name}: arrival, wait and transfer",
        [("r0", "computes"), ("wait", "waits for the last rank"), ("transfer", "transfer")],
    )
    lanes = Lanes(canvas, 78, 600 / (end + 2 * lead), 28, -lead)
    ranks, alt, y = sorted({row["rank"] for row in rows}), [], 96
    for rank in ranks:
        wait, transfer = [row for row in rows if row["rank"] == rank]
        waited, sent = (row["end_ms"] - row["start_ms"] for row in (wait, transfer))
        canvas.text(4, y + 19, f"rank {rank}")
        lanes.box(y, -lead, wait["start_ms"], "r0", tip="computes")
        lanes.box(y, wait["start_ms"], wait["end_ms"], "wait", tip=f"waits {waited:.3f} ms")
        lanes.box(y, wait["end_ms"], transfer["end_ms"], "transfer", tip=f"transfer {sent:.3f} ms")
        lanes.box(y, transfer["end_ms"], end + lead, "r0", tip="computes")
        alt.append(f"rank {rank} waits {waited:.2f} ms")
        y += 42
    canvas.line((lanes.at(met), 82), (lanes.at(met), y), "ink dashed", width=1.5)
    canvas.text(lanes.at(met), 76, "the last rank arrives", "small", "middle")
    canvas.line((lanes.at(0), y + 8), (lanes.at(end), y + 8), "ink")
    canvas.note(lanes.at(0), y + 24, "0")
    canvas.note(lanes.at(end), y + 24, f"{end:.2f} ms")
    canvas.note(0, y + 48, measured, "start")
    return canvas.svg(
        "Arrival, wait and transfer of one barrier",
        f"One barrier, {name}. The last rank ends all waits: {', '.join(alt)}",
    )


def predicted(words: list[str], root: Path) -> Picture:
    """`predicted FILE`: the simulated timeline of a step above the measured one of a traced run."""
    passes = {
        "F": ("r0", "F forward"),
        "B": ("r2", "B backward"),
        "I": ("r2", "I input gradient"),
        "W": ("r1", "W weight gradient"),
        "OVERLAP_F_B": ("r4", "F and B together"),
    }
    trace, where = load_trace(root, words)
    rows = {
        word: [row for row in trace["rows"] if row["what"] == what]
        for word, what in (("predicted", "simulated"), ("measured", "measured"))
    }
    ends = {word: max(row["end_ms"] for row in own) for word, own in rows.items()}
    ranks = 1 + max(row["rank"] for row in rows["measured"])
    kinds = dict.fromkeys(row["kind"] for row in rows["measured"])
    canvas = Drawing(
        f"{trace['layout']}, {trace['schedule']}: predicted above measured",
        [*(passes[kind] for kind in kinds), ("idle", "idle")],
    )
    lanes, y = Lanes(canvas, 82, 640 / max(ends.values()), 22), 92
    for word, own in rows.items():
        canvas.text(0, y - 8, f"{word}: {ends[word]:.1f} ms", "bold")
        for rank in range(ranks):
            canvas.text(4, y + 26 * rank + 16, f"worker {rank}")
            lanes.box(y + 26 * rank, 0, ends[word], "idle")
        for row in own:
            name, start, end = f"{row['kind'][0]}{row['mb']}", row["start_ms"], row["end_ms"]
            fits = (end - start) * lanes.scale > 9 * len(name)
            lanes.box(
                y + 26 * row["rank"],
                start,
                end,
                passes[row["kind"]][0],
                style="small",
                words=name if fits else "",
                tip=f"{name}: {start:.2f} to {end:.2f} ms",
            )
        y += 26 * ranks + 38
    canvas.note(0, y - 10, where, "start")
    return canvas.svg(
        "Predicted above measured",
        (
            f"Two timelines of one step of {trace['schedule']}: predicted {ends['predicted']:.1f}"
            f" ms above, measured {ends['measured']:.1f} ms below"
        ),
    )


def ranges(words: list[str], root: Path) -> Picture:
    """`range`: which numbers float32, bfloat16 and float16 can hold, as powers of two."""
    canvas, alt, y = (
        Drawing(
            "The numbers that each type can hold, as powers of two",
            [
                ("r2", "full precision"),
                ("r1", "fewer and fewer digits (subnormal)"),
                ("idle", "becomes 0, or infinite"),
            ],
        ),
        [],
        86,
    )
    lanes = Lanes(canvas, 84, 620 / 280, 26, -150)
    for kind in (np.float32, ml_dtypes.bfloat16, np.float16):
        info, name = ml_dtypes.finfo(kind), np.dtype(kind).name
        small, normal, large = (
            log2(float(one)) for one in (info.smallest_subnormal, info.tiny, info.max)
        )
        canvas.text(4, y + 17, name, "bold")
        lanes.box(y, -150, 130, "idle")
        lanes.box(y, small, normal, "r1")
        lanes.box(y, normal, large, "r2")
        span = f"2^{small:.0f} to {float(info.max):.3g}"
        step = f"next number after 1: 1 + 2^{round(log2(float(info.eps)))}"
        canvas.note(lanes.left, y + 40, f"{span}; {step}", "start")
        alt.append(f"{name}: {span}, {step}")
        y += 62
    for power in range(-120, 131, 40):
        canvas.note(lanes.at(power), y + 10, f"2^{power}")
    return canvas.svg(
        "Ranges of float32, bfloat16 and float16",
        f"Ranges of three types of numbers. {'. '.join(alt)}",
    )


def tokens(words: list[str], root: Path) -> Picture:
    """`tokens --cp Q [--seq-len T]`: which rank holds which tokens of a row, and its work."""
    args, alt, y = arguments("tokens", words, cp=4, seq_len=4096), [], 80
    ranks, length = range(args.cp), args.seq_len
    canvas = Drawing(
        f"A row of {length:,} tokens over {args.cp} ranks: who holds which tokens, and how many"
        " pairs it multiplies",
        [(f"r{rank}", f"rank {rank}") for rank in ranks],
    )
    held = {
        method: [token_pieces(length, method, args.cp, rank) for rank in ranks]
        for method in ("ring", "ulysses")
    }
    # Pairs of a query in these pieces with a key at or before its position.
    counts = {
        method: [
            sum((one.stop * (one.stop + 1) - one.start * (one.start + 1)) // 2 for one in pieces)
            for pieces in own
        ]
        for method, own in held.items()
    }
    lanes = Lanes(canvas, 150, 560 / length, 30)
    bars = Lanes(canvas, 150, 0.8 * 560 / max(max(own) for own in counts.values()), 12)
    for method, parts, methods in (
        ("ring", "two pieces each", "ring, gather"),
        ("ulysses", "one run each", "ulysses"),
    ):
        canvas.text(0, y + 12, parts)
        canvas.note(0, y + 28, f"{methods}", "start")
        for rank, pieces in enumerate(held[method]):
            for one in pieces:
                lanes.box(
                    y,
                    one.start,
                    one.stop,
                    f"r{rank}",
                    words=str(rank),
                    tip=f"{one.start} to {one.stop - 1}",
                )
        y += 40
        for rank, number in enumerate(counts[method]):
            bars.box(y, 0, number, f"r{rank}")
            canvas.note(bars.at(number) + 8, y + 10, f"{number:,} pairs", "start")
            y += 14
        y += 30
        alt.append(f"{parts} ({methods}): {min(counts[method]):,} to {max(counts[method]):,} pairs")
    return canvas.svg(
        "Tokens held by each rank", f"Tokens of a row on {args.cp} ranks. {'. '.join(alt)}"
    )


def bars(words: list[str], root: Path) -> Picture:
    """`bars LAYOUT [LAYOUT] [--memory GiB] [flags of explain]`: memory of the fullest rank.

    A layout may be `pp=4,tp=8+sp` for --sequence-parallel.
    """
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    parser, found = Parser(prog="bars"), {}
    parser.add_argument("--memory", type=float, default=0)
    args, flags = parser.parse_known_args(words[first:])
    for layout in words[:first]:
        sizes, _, more = layout.partition("+")
        extra = ["--sequence-parallel"] * (more == "sp")
        found[layout] = fullest(config_of(["--layout", sizes, *extra, *flags])).peak_bytes
    limit, y, alt = args.memory * (1 << 30), 88, []
    labels = purposes_of(found.values())
    canvas = Drawing(
        "Memory of the fullest rank, by layout",
        [(PURPOSES.get(label, "r5"), label) for label in labels],
    )
    lanes = Lanes(canvas, 170, 480 / max(limit, *(sum(one.values()) for one in found.values())), 22)
    for layout, own in found.items():
        canvas.text(162, y + 16, layout.replace("+sp", ", seq. parallel"), "", "end")
        done = 0
        for label in labels:
            size, kind = own.get(label, 0), PURPOSES.get(label, "r5")
            lanes.box(y, done, done + size, kind, tip=f"{label} {nbytes(size)}")
            done += size
        canvas.text(lanes.at(done) + 6, y + 16, nbytes(done), "small")
        alt.append(f"{layout} {nbytes(done)}")
        y += 34
    if limit:
        canvas.line((lanes.at(limit), 80), (lanes.at(limit), y), "limit dashed", width=2)
        canvas.text(lanes.at(limit), y + 16, f"{nbytes(limit)} of the device", "small", "middle")
        alt.append(f"the device has {nbytes(limit)}")
    return canvas.svg("Memory by layout", f"Memory of the fullest rank as bars: {'; '.join(alt)}")


def buckets(words: list[str], root: Path) -> Picture:
    """`buckets [flags of explain]`: gradient all-reduces in flight during the backward pass.

    From a step of rank 0 on shapes, where the FLOPs of the products done so far stand in for time.
    """
    config = config_of(words)
    step = watch(config, 0)
    sums = [
        (max(look.flops for look in step.seen if look.posted <= place), nbytes(one.payload_bytes))
        for place, one in enumerate(step.records)
        if one.name in ("grads.bucket", "grads.late")
    ]
    if not sums:
        raise UsageError("no sums of gradients: choose a layout with dp")
    passes = [look for look in step.seen if look.name]
    end = passes[-1].flops
    start = min(sums[0][0], max((look.flops for look in passes if look.name[0] == "F"), default=0))
    canvas = Drawing(
        f"{layout_words(config)}: gradients travel while the backward pass continues",
        [("r2", "rank 0 computes"), ("dp", "sum of a bucket may travel")],
    )
    lanes = Lanes(canvas, 92, 600 / (end - start), 26, start)
    canvas.text(0, 101, "passes")
    for before, one in zip([start, *(look.flops for look in passes)], passes, strict=False):
        if one.flops > max(before, start):
            lanes.box(84, max(before, start), one.flops, "r2", words=one.name)
    y = 124
    for flops, size in sums:
        canvas.rect(lanes.at(flops), y, max(3.0, (end - flops) * lanes.scale), 13, "dp", tip=size)
        canvas.note(84, y + 10, size, "end")
        y += 16
    canvas.line((lanes.at(end), 74), (lanes.at(end), y), "wait dashed", width=2)
    canvas.text(lanes.at(end), y + 16, "here rank 0 waits for all of them", "small", "end")
    return canvas.svg(
        "Buckets of gradients in flight",
        (
            f"{len(sums)} buckets of gradients are posted one after the other during the backward"
            " pass, and waited for at its end"
        ),
    )


def rows(words: list[str], root: Path) -> Picture:
    """`rows --ep Q --experts E --tokens T`: rows that ranks get for their experts, by routing."""
    args, alt, y = arguments("rows", words, ep=4, experts=8, tokens=64), [], 80
    ranks, per_token = range(args.ep), 2
    canvas = Drawing(
        f"Rows that each of {args.ep} ranks gets for its experts, by the rank that sends them"
        f" ({args.tokens} tokens each, {per_token} of {args.experts} experts)",
        [(f"r{rank}", f"from rank {rank}") for rank in ranks],
    )
    lanes = Lanes(canvas, 150, 0.8 * 560 / (args.tokens * per_token * args.ep * 0.6), 14)
    for routing in ("uniform", "zipf", "adversarial"):
        canvas.text(0, y + 12, routing)
        parts = [
            np.rint(
                args.tokens
                * per_token
                * shares(routing, args.experts, rank, args.ep).reshape(args.ep, -1).sum(axis=1)
            )
            for rank in ranks
        ]
        for receiver in ranks:
            start = 0
            for rank in ranks:
                count = int(parts[rank][receiver])
                if count:
                    lanes.box(y, start, start + count, f"r{rank}", tip=f"{count} rows")
                start += count
            canvas.note(lanes.at(start) + 8, y + 11, f"rank {receiver}: {start} rows", "start")
            y += 17
        got = sum(parts)
        alt.append(f"{routing}: {got.min():.0f} to {got.max():.0f} rows")
        y += 16
    return canvas.svg("Rows of each rank", f"Rows that {args.ep} ranks get. {'; '.join(alt)}")
