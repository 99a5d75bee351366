"""`predicted FILE`: the simulated timeline of a step above the measured one of a traced run."""

from __future__ import annotations

from bench.docs.pictures.drawing import Drawing
from bench.docs.pictures.files import load_trace, machine_words

LEFT, WIDE, ROW, HIGH, TOP = 82, 640, 26, 22, 92
FILL = {"F": "r0", "B": "r2", "I": "r2", "W": "r1", "OVERLAP_F_B": "r4"}
NAMES = {"F": "F forward", "B": "B backward", "I": "I input gradient", "W": "W weight gradient",
         "OVERLAP_F_B": "F and B together"}


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    found, trace = load_trace(root, words)
    rows = {what: [row for row in trace["rows"] if row["what"] == what]
            for what in ("simulated", "measured")}
    ends = {what: max(row["end_ms"] for row in own) for what, own in rows.items()}
    scale = WIDE / max(ends.values())
    ranks = 1 + max(row["rank"] for row in rows["measured"])
    kinds = dict.fromkeys(row["kind"] for row in rows["measured"])
    canvas = Drawing(f"{trace['layout']}, {trace['schedule']}: predicted above measured",
                     [*((FILL[kind], NAMES[kind]) for kind in kinds), ("idle", "idle")])
    y = TOP
    for what, own in rows.items():
        word = "predicted" if what == "simulated" else "measured"
        canvas.text(0, y - 8, f"{word}: {ends[what]:.1f} ms", "bold")
        for rank in range(ranks):
            canvas.text(4, y + ROW * rank + 16, f"worker {rank}")
            canvas.rect(LEFT, y + ROW * rank, WIDE * ends[what] / max(ends.values()), HIGH, "idle")
        for row in own:
            width = (row["end_ms"] - row["start_ms"]) * scale
            x, top = LEFT + row["start_ms"] * scale, y + ROW * row["rank"]
            text = f"{row['kind'][0]}{row['mb']}"
            canvas.rect(x, top, width, HIGH, FILL[row["kind"]],
                        tip=f"{text}: {row['start_ms']:.2f} to {row['end_ms']:.2f} ms")
            if width > 9 * len(text):
                canvas.text(x + width / 2, top + 15, text, "small", "middle")
        y += ROW * ranks + 38
    canvas.text(0, y - 10, machine_words(found), "soft small")
    alt = (f"Two timelines of one step of {trace['schedule']}: predicted {ends['simulated']:.1f}"
           f" ms above, measured {ends['measured']:.1f} ms below")
    return canvas.svg("Predicted above measured", alt), alt
