"""`buckets [flags of explain]`: sums of gradients that travel while the backward pass goes on.

From a step of rank 0 on shapes. Work done so far, in FLOPs of products, stands in for time.
"""

from __future__ import annotations

from collections import deque

from bench.docs.pictures import shapes
from bench.docs.pictures.drawing import Drawing
from bench.docs.pictures.memory import Watching, watch
from mpipar.console.tables import nbytes
from mpipar.errors import UsageError

LEFT, WIDE, TOP, HIGH, BAR = 92, 600, 84, 26, 16
NAMES = ("grads.bucket", "grads.late")  # sums of gradients over copies


class Noted(deque):
    """The entries of a recorder, with the FLOPs done when each was posted."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder, self.posted = recorder, []

    def append(self, entry) -> None:
        """Keep an entry and when it came."""
        self.posted.append(sum(self.recorder.ops.flops.values()) if self.recorder.ops else 0)
        super().append(entry)


class Posting(Watching):
    """A recorder that notes the FLOPs done at each posting."""

    def __init__(self):
        super().__init__()
        self.entries = Noted(self)


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    config = shapes.config_of(words)
    recorder = watch(config, 0, Posting())
    sums = zip(recorder.entries.posted, recorder.records, strict=True)
    sums = [(flops, record) for flops, record in sums if record.name in NAMES]
    if not sums:
        raise UsageError("no sums of gradients: choose a layout with dp")
    passes = [(flops, name) for flops, name, _ in recorder.seen if name]
    end = passes[-1][0]
    first = max((flops for flops, name in passes if name[0] == "F" and name[1:].isdigit()),
                default=0)
    start = min(first, sums[0][0])
    scale = WIDE / (end - start)
    canvas, last = Drawing(
        f"{shapes.layout_words(config)}: gradients travel while the backward pass goes on",
        [("r2", "rank 0 computes"), ("dp", "sum of a bucket may travel")]), 0
    canvas.text(0, TOP + 17, "passes")
    for flops, name in passes:
        if flops > max(last, start):
            x = LEFT + (max(last, start) - start) * scale
            canvas.rect(x, TOP, (flops - max(last, start)) * scale, HIGH, "r2")
            canvas.text(x + (flops - max(last, start)) * scale / 2, TOP + 17, name, "", "middle")
        last = flops
    for place, (flops, record) in enumerate(sums):
        x, y = LEFT + (flops - start) * scale, TOP + HIGH + 14 + BAR * place
        canvas.rect(x, y, max(3.0, (end - flops) * scale), BAR - 3, "dp",
                    tip=nbytes(record.payload_bytes))
        canvas.text(LEFT - 8, y + 10, nbytes(record.payload_bytes), "soft small", "end")
    bottom = TOP + HIGH + 14 + BAR * len(sums)
    canvas.line(LEFT + WIDE, TOP - 10, LEFT + WIDE, bottom, "wait dashed", width=2)
    canvas.text(LEFT + WIDE, bottom + 16, "here rank 0 waits for all of them", "small", "end")
    alt = (f"{len(sums)} buckets of gradients are posted one after the other during the backward"
           " pass, and waited for at its end")
    return canvas.svg("Buckets of gradients in flight", alt), alt
