"""`barrier FILE`: arrival, wait and transfer of each rank at one barrier of a traced run."""

from __future__ import annotations

from bench.docs.pictures.drawing import Drawing
from bench.docs.pictures.files import load_trace, machine_words
from mpipar.errors import DataError

LEFT, TOP, WIDE, ROW, HIGH = 78, 96, 600, 42, 28


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    found, trace = load_trace(root, words)
    rows = [row for row in trace["rows"] if ": " in row["what"]]
    if not rows:
        raise DataError(f"{words[0]}: has no barrier of several ranks")
    name = rows[0]["what"].partition(": ")[2]
    end = max(row["end_ms"] for row in rows)
    lead = 0.15 * end  # shown before the first arrival and after the end
    scale = WIDE / (end + 2 * lead)
    met = max(row["end_ms"] for row in rows if row["what"].startswith("wait"))
    canvas = Drawing(f"One barrier, {name}: arrival, wait and transfer", [
        ("r0", "computes"), ("wait", "waits for the last rank"), ("transfer", "transfer")])
    ranks, told = sorted({row["rank"] for row in rows}), []
    for place, rank in enumerate(ranks):
        wait, transfer = [row for row in rows if row["rank"] == rank]
        y = TOP + ROW * place
        x1, x2, x3 = (LEFT + (lead + time) * scale for time in (
            wait["start_ms"], wait["end_ms"], transfer["end_ms"]))
        canvas.text(4, y + 19, f"rank {rank}")
        canvas.rect(LEFT, y, x1 - LEFT, HIGH, "r0", tip="computes")
        waited = wait["end_ms"] - wait["start_ms"]
        canvas.rect(x1, y, x2 - x1, HIGH, "wait", tip=f"waits {waited:.3f} ms")
        canvas.rect(x2, y, x3 - x2, HIGH, "transfer",
                    tip=f"transfer {transfer['end_ms'] - transfer['start_ms']:.3f} ms")
        canvas.rect(x3, y, LEFT + WIDE - x3, HIGH, "r0", tip="computes")
        told.append(f"rank {rank} waits {waited:.2f} ms")
    bottom = TOP + ROW * len(ranks)
    x = LEFT + (lead + met) * scale
    canvas.line(x, TOP - 14, x, bottom, "ink dashed", width=1.5)
    canvas.text(x, TOP - 20, "the last rank arrives", "small", "middle")
    canvas.line(LEFT + lead * scale, bottom + 8, LEFT + (lead + end) * scale, bottom + 8, "ink")
    canvas.text(LEFT + lead * scale, bottom + 24, "0", "soft small", "middle")
    canvas.text(LEFT + (lead + end) * scale, bottom + 24, f"{end:.2f} ms", "soft small", "middle")
    canvas.text(0, bottom + 48, machine_words(found), "soft small")
    alt = f"One barrier, {name}. The last rank ends all waits: {', '.join(told)}"
    return canvas.svg("Arrival, wait and transfer of one barrier", alt), alt
