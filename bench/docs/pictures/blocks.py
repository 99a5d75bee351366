"""`blocks column|row|pair|gather --ranks Q`: who holds which block of x, w and y of a product.

The barriers come from a step on shapes of a decoder with one block, cut over Q ranks.
"""

from __future__ import annotations

from bench.docs.pictures import shapes
from bench.docs.pictures.drawing import Drawing
from mpipar.comm.grid import piece
from mpipar.config.flags import Parser, count
from mpipar.console.tables import nbytes
from mpipar.plan.predict import predict

TOP, GAP = 74, 26
ROWS, NARROW, BROAD = 56, 64, 128  # drawn lengths: tokens, width D, width F
NAMES = {"up": ("x", "w up", "h"), "down": ("h", "w down", "y")}


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    parser = Parser(prog="blocks")
    parser.add_argument("cut", choices=("column", "row", "pair", "gather"))
    parser.add_argument("--ranks", type=count, default=2)
    args = parser.parse_args(words)
    config = shapes.config_of([*shapes.SMALL, "--tp", str(args.ranks), "--ffn-cut",
                               "gather" if args.cut == "gather" else "pair"])
    records = [one for one in predict(config, 0).recorder.records
               if one.name.startswith("block0.ffn")]
    canvas = Drawing(
        f"One product cut over {args.ranks} ranks: the colour of a block is the rank that holds it",
        [*((f"r{rank}", f"rank {rank}") for rank in range(args.ranks)),
         ("plain", "every rank holds all of it")])
    x, told = 0.0, []
    for product in {"column": ["up"], "row": ["down"]}.get(args.cut, ["up", "down"]):
        x = draw_product(canvas, x, product, args, told, records)
    draw_backward(canvas, args, records, told)
    alt = (f"A product cut over {args.ranks} ranks ({args.cut}): blocks of x, w and y in the"
           f" colours of their ranks. {'. '.join(told)}")
    return canvas.svg(f"Who holds what: {args.cut}", alt), alt


def draw_product(canvas, x: float, product: str, args, told: list, records) -> float:
    """x @ w = y from x on, and the barrier behind it; returns where the next one starts."""
    by_column = product == "up" or args.cut == "gather"
    inner, outer = (NARROW, BROAD) if product == "up" else (BROAD, NARROW)
    names = NAMES[product]
    if x == 0:
        x = matrix(canvas, x, names[0], (ROWS, inner), None if by_column else 1, args.ranks)
    canvas.text(x - GAP / 2, TOP + 66, "x", "soft", "middle")
    x = matrix(canvas, x, names[1], (inner, outer), 1 if by_column else 0, args.ranks)
    canvas.text(x - GAP / 2, TOP + 66, "=", "soft", "middle")
    if by_column:
        x = matrix(canvas, x, names[2], (ROWS, outer), 1, args.ranks)
    else:
        x = parts_of_sum(canvas, x, names[2], outer, args.ranks)
    found = [one for one in records if one.phase == "F" and one.name.endswith(product)]
    for record in found:
        x = barrier(canvas, x, record, told, "forward")
        x = matrix(canvas, x, names[2], (ROWS, outer), None, args.ranks)
    return x


def matrix(canvas, x: float, name: str, shape: tuple, cut: int | None, ranks: int) -> float:
    """A matrix (rows, columns) cut along an axis, or held whole by everybody; returns x behind."""
    rows, columns = shape
    y = TOP + 64 - rows / 2
    canvas.text(x + columns / 2, TOP - 8, name, "bold", "middle")
    if cut is None:
        canvas.rect(x, y, columns, rows, "plain", tip=f"{name}: every rank holds it")
    else:
        for rank in range(ranks):
            own = piece((rows, columns)[cut], ranks, rank)
            width, height = (own.stop - own.start, rows) if cut else (columns,
                                                                     own.stop - own.start)
            canvas.rect(x + own.start * cut, y + own.start * (1 - cut), width, height, f"r{rank}",
                        tip=f"{name}: rank {rank}")
    return x + columns + GAP


def parts_of_sum(canvas, x: float, name: str, columns: int, ranks: int) -> float:
    """Each rank's part of a sum, all of the whole shape, one behind the other."""
    canvas.text(x + columns / 2, TOP - 8, f"parts of {name}", "bold", "middle")
    for rank in range(ranks):
        canvas.rect(x + 9 * rank, TOP + 36 + 11 * rank, columns, ROWS, f"r{rank}",
                    tip=f"rank {rank}'s part of {name}, to be added")
    return x + columns + 9 * (ranks - 1) + GAP


def barrier(canvas, x: float, record, told: list, when: str) -> float:
    """A red bar with the operation, and its bytes; returns x behind it."""
    words = record.operation.replace("_", "-")
    canvas.rect(x, TOP - 2, 7, 132, "wait", tip=f"{record.name}: {words}")
    canvas.text(x + 3, TOP + 148, words, "bold small", "middle")
    canvas.text(x + 3, TOP + 163, nbytes(record.payload_bytes), "soft small", "middle")
    told.append(f"Barrier in {when}: {words}, {nbytes(record.payload_bytes)}")
    return x + 7 + GAP


def draw_backward(canvas, args, records, told: list) -> None:
    """A line about the barriers of the backward pass, in their order."""
    ends = {"column": ("up",), "row": ("down",)}.get(args.cut, ("up", "down"))
    found = [one for one in records if one.phase != "F" and one.name.endswith(ends)]
    texts = [f"{one.operation.replace('_', '-')} of the input gradient at"
             f" {one.name.split('.')[-1]}, {nbytes(one.payload_bytes)}" for one in found]
    words = "; ".join(texts) or "none: each rank needs only what it has"
    canvas.text(0, TOP + 192, f"Barriers of the backward pass: {words}.", "soft")
    told.append(f"Barriers of the backward pass: {words}")
