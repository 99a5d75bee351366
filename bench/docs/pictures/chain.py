"""`chain [flags of explain]`: a block as a chain of layers, with the barriers of both directions.

The barriers and their bytes come from a step of rank 0 on shapes.
"""

from __future__ import annotations

from bench.docs.pictures import shapes
from bench.docs.pictures.drawing import Drawing
from mpipar.console.tables import nbytes
from mpipar.errors import UsageError
from mpipar.plan.predict import predict

WIDE, HIGH, STEP, TOP, DOWN = 84, 44, 112, 92, 120
LAYERS = {"norm1": "norm", "attn.qkv": "q, k, v", "attn": "attention", "attn.proj": "projection",
          "norm2": "norm", "ffn.up": "up", "ffn.down": "down"}
CUT = {"attn.qkv", "attn", "attn.proj", "ffn.up", "ffn.down"}  # each rank has its part of these


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    config = shapes.config_of(words)
    records = [one for one in predict(config, 0).recorder.records
               if one.name.startswith("block0.") and one.mb == 0 and one.phase in ("F", "I", "B")]
    if not records:
        raise UsageError("no barriers in a block: choose a layout with tp or cp")
    forward = {one.name.removeprefix("block0."): one for one in records if one.phase == "F"}
    backward = {one.name.removeprefix("block0."): one for one in records if one.phase != "F"}
    canvas = Drawing(
        f"One block of one microbatch on {shapes.layout_words(config)}: layers, and where all ranks"
        " wait", [("r0", "each rank has its part"), ("plain", "every rank does all of it"),
                  ("wait", "barrier")])
    for row, (title, found) in enumerate((("forward", forward), ("backward", backward))):
        y = TOP + DOWN * row
        canvas.text(0, y + 26, title, "bold")
        for place, (name, label) in enumerate(LAYERS.items()):
            x = 84 + STEP * place
            canvas.rect(x, y, WIDE, HIGH, "r0" if name in CUT else "plain", tip=f"block0.{name}")
            canvas.text(x + WIDE / 2, y + 26, label, "", "middle")
            if place + 1 < len(LAYERS):
                ends = (x + WIDE + 2, x + STEP - 3)
                start, end = ends if row == 0 else ends[::-1]
                canvas.line(start, y + HIGH / 2, end, y + HIGH / 2, "ink", arrow=True)
            if name in found:
                mark(canvas, found[name], x + WIDE + 10 if row == 0 else x - 18, y)
    told = [f"{title} {one.name} {one.operation.replace('_', '-')} {nbytes(one.payload_bytes)}"
            for title, found in (("forward", forward), ("backward", backward))
            for one in found.values()]
    alt = f"A block as a chain of layers with {len(told)} barriers: {'; '.join(told)}"
    return canvas.svg("A block and its barriers", alt), alt


def mark(canvas, record, x: float, y: float) -> None:
    """A red bar where ranks wait, with its operation and bytes."""
    canvas.rect(x, y - 8, 7, HIGH + 16, "wait", tip=record.name)
    canvas.text(x + 3, y + HIGH + 22, record.operation.replace("_", "-"), "small bold", "middle")
    canvas.text(x + 3, y + HIGH + 36, nbytes(record.payload_bytes), "small soft", "middle")
