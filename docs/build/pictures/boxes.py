"""Pictures of what each rank holds: blocks of a product, layers, grids of ranks, and a ring."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt
from pathlib import Path

from bench.training import config_of
from docs.build.pictures.shapes import arguments, layout_words
from docs.build.pictures.svg import Drawing
from mpipar.comm.grid import AXES, Grid, chunk_slice
from mpipar.errors import UsageError
from mpipar.run.console.tables import nbytes
from mpipar.study.explain.predict import predict

Picture = tuple[str, str]  # SVG and alt text
PRODUCTS = {"up": ("x", "w up", "h"), "down": ("h", "w down", "y")}
CUTS = {"column": ("up",), "row": ("down",), "pair": ("up", "down"), "gather": ("up", "down")}
TOP, GAP = 74, 26
TOKENS, WIDTHS = 56, {"up": (64, 128), "down": (128, 64)}  # drawn lengths


def barrier(canvas: Drawing, x: float, top: float, high: float, record) -> str:
    """Draw a red bar where ranks wait; return its label, the operation and its bytes."""
    operation, size = record.operation.replace("_", "-"), nbytes(record.payload_bytes)
    canvas.rect(x, top, 7, high, "wait", tip=record.name)
    canvas.text(x + 3, top + high + 15, operation, "bold small", "middle")
    canvas.note(x + 3, top + high + 29, size)
    return f"{operation}, {size}"


def blocks(words: list[str], root: Path) -> Picture:
    """`blocks column|row|pair|gather --ranks Q`: which rank holds which block of a product's x, w
    and y.

    The barriers come from a step on shapes of a decoder with one block, cut over Q ranks.
    """
    args = arguments("blocks", words, cut=tuple(CUTS), ranks=2)
    config = config_of(
        [
            *"--layers 1 --num-microbatches 1 --batch-size 4 --tp".split(),
            str(args.ranks),
            "--ffn-cut",
            "gather" if args.cut == "gather" else "pair",
        ]
    )
    records = [
        one
        for one in predict(config, 0).recorder.records
        if one.name.startswith("block0.ffn") and one.name.endswith(CUTS[args.cut])
    ]
    canvas = Drawing(
        f"One product cut over {args.ranks} ranks: the colour of a block is the rank that holds it",
        [
            *((f"r{rank}", f"rank {rank}") for rank in range(args.ranks)),
            ("plain", "every rank holds all of it"),
        ],
    )
    x, alt = 0.0, []
    for product in CUTS[args.cut]:
        by_column = product == "up" or args.cut == "gather"
        (before, weights, after), (inner, outer) = PRODUCTS[product], WIDTHS[product]
        if x == 0:
            x = matrix(canvas, x, before, (TOKENS, inner), None if by_column else 1, args.ranks)
        canvas.text(x - GAP / 2, TOP + 66, "x", "soft", "middle")
        x = matrix(canvas, x, weights, (inner, outer), 1 if by_column else 0, args.ranks)
        canvas.text(x - GAP / 2, TOP + 66, "=", "soft", "middle")
        if by_column:
            x = matrix(canvas, x, after, (TOKENS, outer), 1, args.ranks)
        else:
            x = parts_of_sum(canvas, x, after, outer, args.ranks)
        for record in records:
            if record.phase == "F" and record.name.endswith(product):
                alt.append(f"Barrier in forward: {barrier(canvas, x, TOP - 2, 132, record)}")
                x = matrix(canvas, x + 7 + GAP, after, (TOKENS, outer), None, args.ranks)
    texts = [
        f"{one.operation.replace('_', '-')} of the input gradient at"
        f" {one.name.split('.')[-1]}, {nbytes(one.payload_bytes)}"
        for one in records
        if one.phase != "F"
    ]
    alt.append(
        "Barriers of the backward pass: "
        + ("; ".join(texts) or "none: each rank needs only what it has")
    )
    canvas.text(0, TOP + 192, f"{alt[-1]}.", "soft")
    return canvas.svg(
        f"Who holds what: {args.cut}",
        (
            f"A product cut over {args.ranks} ranks ({args.cut}): blocks of x, w and y in the"
            f" colours of their ranks. {'. '.join(alt)}"
        ),
    )


def matrix(
    canvas: Drawing, x: float, name: str, shape: tuple[int, int], cut: int | None, ranks: int
) -> float:
    """Draw a matrix (rows, columns), cut along an axis or whole on every rank; return the x after
    it.
    """
    rows, columns = shape
    y = TOP + 64 - rows / 2
    canvas.text(x + columns / 2, TOP - 8, name, "bold", "middle")
    if cut is None:
        canvas.rect(x, y, columns, rows, "plain", tip=f"{name}: every rank holds it")
    for rank in range(0 if cut is None else ranks):
        own = chunk_slice(shape[cut], ranks, rank)
        length, start = own.stop - own.start, own.start
        canvas.rect(
            x + start * cut,
            y + start * (1 - cut),
            length if cut else columns,
            rows if cut else length,
            f"r{rank}",
            tip=f"{name}: rank {rank}",
        )
    return x + columns + GAP


def parts_of_sum(canvas: Drawing, x: float, name: str, columns: int, ranks: int) -> float:
    """Draw each rank's part of a sum, all of the full shape, one after the other; return the x
    after.
    """
    canvas.text(x + columns / 2, TOP - 8, f"parts of {name}", "bold", "middle")
    for rank in range(ranks):
        canvas.rect(
            x + 9 * rank,
            TOP + 36 + 11 * rank,
            columns,
            TOKENS,
            f"r{rank}",
            tip=f"rank {rank}'s part of {name}, to be added",
        )
    return x + columns + 9 * (ranks - 1) + GAP


def chain(words: list[str], root: Path) -> Picture:
    """`chain [flags of explain]`: a block as a chain of layers, with the barriers of both
    directions, whose bytes come from a step of rank 0 on shapes.
    """
    config = config_of(words)
    records = [
        one
        for one in predict(config, 0).recorder.records
        if one.name.startswith("block0.") and one.mb == 0 and one.phase in ("F", "I", "B")
    ]
    if not records:
        raise UsageError("no barriers in a block: choose a layout with tp or cp")
    layers = {
        "norm1": "norm",
        "attn.qkv": "q, k, v",
        "attn": "attention",
        "attn.proj": "projection",
        "norm2": "norm",
        "ffn.up": "up",
        "ffn.down": "down",
    }
    canvas = Drawing(
        f"One block of one microbatch on {layout_words(config)}: layers, and where all ranks wait",
        [
            ("r0", "each rank has its part"),
            ("plain", "every rank does all of it"),
            ("wait", "barrier"),
        ],
    )
    alt = []
    for y, title in ((92, "forward"), (212, "backward")):
        forward = title == "forward"
        found = {
            one.name.removeprefix("block0."): one
            for one in records
            if (one.phase == "F") == forward
        }
        canvas.text(0, y + 26, title, "bold")
        alt += [
            f"{title} {one.name} {one.operation.replace('_', '-')} {nbytes(one.payload_bytes)}"
            for one in found.values()
        ]
        for place, (name, words) in enumerate(layers.items()):
            x, whole = 84 + 112 * place, name.startswith("norm")  # no rank has a part of a norm
            canvas.rect(x, y, 84, 44, "plain" if whole else "r0", tip=f"block0.{name}", words=words)
            if place + 1 < len(layers):
                ends = [(x + 86, y + 22), (x + 109, y + 22)]
                canvas.line(*(ends if forward else ends[::-1]), "ink", arrow=True)
            if name in found:
                barrier(canvas, x + 94 if forward else x - 18, y - 8, 60, found[name])
    return canvas.svg(
        "A block and its barriers",
        (f"A block as a chain of layers with {len(alt)} barriers: {'; '.join(alt)}"),
    )


def grid(words: list[str], root: Path) -> Picture:
    """`grid [flags of explain]`: the ranks of a layout, and the bytes of each axis between them."""
    says = {
        "dp": "sums of gradients",
        "pp": "activations and their gradients",
        "cp": "keys and values",
        "tp": "barriers inside layers",
    }
    config = config_of(words)
    steps = [predict(config, rank) for rank in range(config.grid.num_ranks)]
    grids = [Grid.of(config.grid, step.world_rank) for step in steps]
    most = dict.fromkeys(AXES, 0)
    for step in steps:
        sent = {axis: sums.wire_bytes for (axis,), sums in step.recorder.totals("axis").items()}
        sent["dp"] = sent.get("dp", 0) + sent.pop("data", 0)  # sums over data ranks
        most = {axis: max(size, sent.get(axis, 0)) for axis, size in most.items()}
    axes = [axis for axis in AXES if getattr(config.grid, axis) > 1]
    alt = [f"{axis}: {says[axis]}, {nbytes(most[axis])}" for axis in axes]
    layout = layout_words(config)
    canvas = Drawing(
        f"{layout}: the width of a line is the bytes that a rank sends in a step",
        zip(axes, alt, strict=True),
    )
    middles = [(x + 46, y + 20) for x, y in map(place_of, grids)]
    for axis in axes:
        width = max(1.5, 14 * sqrt(most[axis] / max(most.values())))
        for group in sorted({grid.group(axis) for grid in grids}):
            for low, high in pairwise(group):
                canvas.line(middles[low], middles[high], axis, width=width)
    for one, (x, y) in zip(grids, middles, strict=True):
        canvas.rect(x - 46, y - 20, 92, 40, "plain", tip=one.describe())
        canvas.text(x, y - 3, f"rank {one.world_rank}", "bold", "middle")
        canvas.note(x, y + 12, one.describe())
    return canvas.svg(
        f"Bytes of a step by axis: {layout}",
        (
            f"The ranks of {layout} as boxes, joined along each axis. Most that a rank sends in a"
            f" step: {'; '.join(alt)}"
        ),
    )


def place_of(grid: Grid) -> tuple[float, float]:
    """Return the corner of a rank: pp down, tp and cp across, dp into the depth if there are
    several.
    """
    inner, depth = (
        grid.group_rank("cp") * grid.size("tp") + grid.group_rank("tp"),
        grid.group_rank("dp"),
    )
    layers = grid.size("dp") - 1
    if grid.size("tp") * grid.size("cp") == 1:
        inner, depth, layers = grid.group_rank("dp"), 0, 0
    return (
        4 + (166 + 104 * layers) * inner + 104 * depth,
        76 + (106 + 62 * layers) * grid.group_rank("pp") + 62 * depth,
    )


def hops(size: int) -> list[tuple[list[list[int]], list[int], bool]]:
    """Return (pieces of each rank, the piece each rank sends next, whether it is added) of each
    hop.

    Rank r starts with 10**r in each of its `size` pieces, so the digits of a sum show whose parts
    it contains. In the first size - 1 hops each rank adds the piece that arrives to its own: a
    reduce-scatter. Then each piece's sum is complete on one rank, and size - 1 more hops copy it
    round the ring: an all-gather. After the last hop nothing is sent.
    """
    held, found = [[10**rank] * size for rank in range(size)], []
    for hop in range(2 * (size - 1)):
        adds = hop < size - 1
        sent = [(rank - hop) % size for rank in range(size)]
        found.append(([list(pieces) for pieces in held], sent, adds))
        messages = [held[rank][sent[rank]] for rank in range(size)]
        for rank in range(size):
            place = sent[rank - 1]
            held[rank][place] = messages[rank - 1] + (held[rank][place] if adds else 0)
    return [*found, (held, [], False)]


def ring(words: list[str], root: Path) -> Picture:
    """`ring --ranks Q`: an all-reduce round a ring, with each rank's numbers at each hop."""
    size = arguments("ring", words, ranks=4).ranks
    total, states = sum(10**rank for rank in range(size)), hops(size)
    assert all(value == total for pieces in states[-1][0] for value in pieces), states[-1]
    canvas = Drawing("Each rank starts with a vector of its own and ends with the sum of all.")
    lefts = [76 + rank * (40 * size + 24) for rank in range(size)]
    for rank, left in enumerate(lefts):
        canvas.text(left + 20 * size, 50, f"rank {rank}", "bold", "middle")
    for row, (held, sent, _) in enumerate(states):
        y = 66 + 58 * row
        canvas.text(4, y + 18, f"hop {row}" if row else "start", "bold")
        if row:
            canvas.note(4, y + 33, "added" if states[row - 1][2] else "copied", "start")
        for left, pieces in zip(lefts, held, strict=True):
            for place, value in enumerate(pieces):
                kind = f"r{place % 8}" if value == total else "plain"
                canvas.rect(left + 40 * place, y, 38, 26, kind, words=str(value))
        for rank, place in enumerate(sent):
            x, to = (left + 40 * place + 19 for left in (lefts[rank], lefts[(rank + 1) % size]))
            ends = [((x, y + 27), (to - 4, y + 56))]
            if rank + 1 == size:  # round to the first one
                ends = [((x, y + 27), (x + 26, y + 40)), ((to - 26, y + 43), (to - 3, y + 56))]
            for start, end in ends:
                canvas.line(start, end, "transfer", width=1.6, arrow=end == ends[-1][1])
    return canvas.svg(
        f"All-reduce on a ring of {size} ranks",
        (
            f"All-reduce on a ring of {size} ranks: in {size - 1} hops pieces are added up, in"
            f" {size - 1} more hops the sums are copied. Then every box of every rank holds {total}"
        ),
    )
