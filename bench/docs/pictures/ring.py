"""`ring --ranks Q`: an all-reduce round a ring, with each rank's numbers at each hop."""

from __future__ import annotations

from bench.docs.pictures.drawing import Drawing
from mpipar.config.flags import Parser, count

BOX, HIGH, LEFT, TOP, GAP, STEP = 40, 26, 76, 66, 24, 58


def hops(size: int) -> list[tuple[list[list[int]], list[int] | None, bool]]:
    """(pieces of each rank, the piece that each rank sends next or None, whether it is added).

    Rank r starts with 10**r in each of its `size` pieces, so a sum's digits say who is in it. For
    size - 1 hops each rank adds the piece that arrives to its own: a reduce-scatter. Then one rank
    has the whole sum of a piece, and size - 1 more hops copy it round: an all-gather.
    """
    held = [[10**rank for _ in range(size)] for rank in range(size)]
    found = []
    for hop in range(2 * (size - 1)):
        adds = hop < size - 1
        sent = [(rank - hop) % size for rank in range(size)]
        found.append(([list(pieces) for pieces in held], sent, adds))
        messages = [held[rank][sent[rank]] for rank in range(size)]
        for rank in range(size):
            before = (rank - 1) % size
            place = sent[before]
            held[rank][place] = messages[before] + (held[rank][place] if adds else 0)
    return [*found, (held, None, False)]


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    parser = Parser(prog="ring")
    parser.add_argument("--ranks", type=count, default=4)
    size = parser.parse_args(words).ranks
    states = hops(size)
    total = sum(10**rank for rank in range(size))
    assert all(value == total for pieces in states[-1][0] for value in pieces), states[-1]
    canvas = Drawing("Each rank starts with a vector of its own and ends with the sum of all.")
    wide = size * BOX + GAP
    for rank in range(size):
        middle = LEFT + rank * wide + size * BOX / 2
        canvas.text(middle, TOP - 16, f"rank {rank}", "bold", "middle")
    for row, (held, sent, _) in enumerate(states):
        y = TOP + row * STEP
        name = "start" if row == 0 else f"hop {row}"
        canvas.text(4, y + 18, name, "bold")
        if row:
            canvas.text(4, y + 33, "added" if states[row - 1][2] else "copied", "soft small")
        for rank in range(size):
            for place in range(size):
                draw_box(canvas, held[rank][place], rank, place, (wide, y), total)
        for rank in range(size if sent else 0):
            draw_message(canvas, rank, sent[rank], (wide, y), size)
    alt = (f"All-reduce on a ring of {size} ranks: in {size - 1} hops pieces are added up, in"
           f" {size - 1} more hops the sums are copied. Then every box of every rank holds {total}")
    return canvas.svg(f"All-reduce on a ring of {size} ranks", alt), alt


def draw_box(canvas, value: int, rank: int, place: int, corner: tuple, total: int) -> None:
    """One piece of a rank, in the colour of its place once it is the whole sum."""
    wide, y = corner
    x = LEFT + rank * wide + place * BOX
    kind = f"r{place % 8}" if value == total else "plain"
    canvas.rect(x, y, BOX - 2, HIGH, kind)
    canvas.text(x + BOX / 2 - 1, y + 18, str(value), "", "middle")


def draw_message(canvas, rank: int, place: int, corner: tuple, size: int) -> None:
    """The piece that a rank sends to the next one; the last rank's goes round to the first."""
    wide, y = corner
    x = LEFT + rank * wide + place * BOX + BOX / 2 - 1
    to = LEFT + (rank + 1) % size * wide + place * BOX + BOX / 2 - 1
    if rank + 1 < size:
        canvas.line(x, y + HIGH + 1, to - 4, y + STEP - 2, "transfer", width=1.6, arrow=True)
    else:
        canvas.line(x, y + HIGH + 1, x + 26, y + HIGH + 14, "transfer", width=1.6)
        canvas.line(to - 26, y + STEP - 15, to - 3, y + STEP - 2, "transfer", width=1.6, arrow=True)
