"""`tokens --cp Q [--seq-len T]`: which rank holds which tokens of a row, and its work."""

from __future__ import annotations

from bench.docs.pictures.drawing import Drawing
from mpipar.comm.grid import token_pieces
from mpipar.config.flags import Parser, count

LEFT, WIDE, HIGH, TOP, BAR = 150, 560, 30, 80, 14
METHODS = {"ring": "two pieces each (ring, gather)", "ulysses": "one run each (ulysses)"}


def pairs(pieces) -> int:
    """Pairs of a query in these pieces and a key before it or at its place."""
    return sum((one.stop * (one.stop + 1) - one.start * (one.start + 1)) // 2 for one in pieces)


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    parser = Parser(prog="tokens")
    parser.add_argument("--cp", type=count, default=4)
    parser.add_argument("--seq-len", type=count, default=4096)
    args = parser.parse_args(words)
    ranks, length = args.cp, args.seq_len
    canvas, told, y = Drawing(
        f"A row of {length:,} tokens over {ranks} ranks: who holds which tokens, and how many pairs"
        " it multiplies", [(f"r{rank}", f"rank {rank}") for rank in range(ranks)]), [], TOP
    most = max(pairs(token_pieces(length, method, ranks, rank))
               for method in METHODS for rank in range(ranks))
    for method, title in METHODS.items():
        words, _, methods = title.rstrip(")").partition(" (")
        canvas.text(0, y + 12, words)
        canvas.text(0, y + 28, methods, "soft small")
        counts = []
        for rank in range(ranks):
            held = token_pieces(length, method, ranks, rank)
            for one in held:
                x = LEFT + WIDE * one.start / length
                width = WIDE * (one.stop - one.start) / length
                canvas.rect(x, y, width, HIGH, f"r{rank}", tip=f"{one.start} to {one.stop - 1}")
                canvas.text(x + width / 2, y + 20, str(rank), "", "middle")
            counts.append(pairs(held))
        y += HIGH + 10
        for rank, number in enumerate(counts):
            canvas.rect(LEFT, y, 0.8 * WIDE * number / most, BAR - 2, f"r{rank}")
            canvas.text(LEFT + 8 + 0.8 * WIDE * number / most, y + 10, f"{number:,} pairs",
                        "soft small")
            y += BAR
        y += 30
        told.append(f"{title}: {min(counts):,} to {max(counts):,} pairs")
    alt = f"Tokens of a row on {ranks} ranks. {'. '.join(told)}"
    return canvas.svg("Tokens held by each rank", alt), alt
