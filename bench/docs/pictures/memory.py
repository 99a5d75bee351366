"""`memory [flags of explain] [--rank R]`: what a rank holds in the course of a step, on shapes.

The step is the real one, run without numbers. Work done so far, in FLOPs of products, stands in for
time.
"""

from __future__ import annotations

from bench.docs.pictures import shapes
from bench.docs.pictures.drawing import Drawing
from mpipar import data
from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.console.tables import nbytes
from mpipar.ops.shape_array import labels_of
from mpipar.train.worker import Worker

LEFT, TOP, WIDE, HIGH = 82, 78, 600, 260
COLOURS = {"weights": "r0", "gradients": "r1", "optimizer": "r2", "stash": "r3", "buffers": "r4"}


class Watching(Recorder):
    """A recorder that notes the live bytes and the FLOPs so far, by name at the end of a pass."""

    def __init__(self):
        super().__init__(capacity=1 << 20)
        self.ops, self.seen = None, []

    def look(self, name: str) -> None:
        """Note what is alive now."""
        self.seen.append((sum(self.ops.flops.values()), name, self.ops.live))

    def enter(self, phase: str) -> None:
        """Note what is alive before a phase."""
        if self.ops is not None:
            self.look(phase)
        super().enter(phase)

    def span(self, kind: str, start, stage: int = -1, mb: int = -1, end=None) -> None:
        """Note what is alive behind a pass."""
        super().span(kind, start, stage, mb, end)
        self.look(f"{kind}{mb}" if mb >= 0 else kind)


def watch(config, world_rank: int, recorder: Watching) -> Watching:
    """A step of one rank on shapes, watched by this recorder."""
    ops = recorder.ops = ops_module.shapes_for(config.run, recorder)
    worker = Worker(config, Grid.of(config.grid, world_rank), ops, recorder)
    recorder.look("start")
    count = ops._count

    def count_and_look(flops: int) -> None:
        count(flops)
        recorder.look("")

    ops._count = count_and_look
    batch = data.data_of(config.model).blank_batch
    worker.train_step(1, lambda mb: batch(ops, config))
    recorder.look("end")
    return recorder


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    config, rank = shapes.config_of(words), shapes.context_of(words).args.rank or 0
    seen = watch(config, rank, Watching()).seen
    labels = [label for label in labels_of(live for _, _, live in seen)
              if any(live.get(label) for _, _, live in seen)]
    most, work = max(sum(live.values()) for *_, live in seen), seen[-1][0]
    canvas = Drawing(f"Memory of rank {rank} in one step: {shapes.layout_words(config)}",
                     [(COLOURS.get(label, "r5"), label) for label in labels])

    def at(flops: int, size: float) -> tuple[float, float]:
        return LEFT + WIDE * flops / work, TOP + HIGH * (1 - size / most)

    below = [0.0] * len(seen)
    for label in labels:
        above = [low + live.get(label, 0) for low, (*_, live) in zip(below, seen, strict=True)]
        points = [at(flops, size) for (flops, *_), size in zip(seen, above, strict=True)]
        points += [at(flops, size) for (flops, *_), size in
                   reversed(list(zip(seen, below, strict=True)))]
        peak = max(live.get(label, 0) for *_, live in seen)
        canvas.area(points, COLOURS.get(label, "r5"), f"{label}: at most {nbytes(peak)}")
        below = above
    for share in (0, 0.5, 1):
        canvas.text(LEFT - 8, at(0, most * share)[1] + 4, nbytes(most * share), "soft small", "end")
    mark_passes(canvas, seen, at)
    parts = ", ".join(f"{label} {nbytes(max(live.get(label, 0) for *_, live in seen))}"
                      for label in labels)
    alt = (f"Memory of a rank as stacked areas over the passes of one step. At most: {parts};"
           f" together {nbytes(most)}")
    return canvas.svg("Memory over a step", alt), alt


def mark_passes(canvas, seen: list, at) -> None:
    """The name of each pass below the piece of work that it is, where there is room."""
    last = 0
    for flops, name, _ in seen:
        left, right = at(last, 0)[0], at(flops, 0)[0]
        if not name:
            continue
        if flops > last:
            canvas.line(right, TOP + HIGH, right, TOP + HIGH + 6, "ink")
            if right - left > 8 * len(name):
                canvas.text((left + right) / 2, TOP + HIGH + 17, name, "soft small", "middle")
        last = flops
    canvas.text(LEFT + WIDE / 2, TOP + HIGH + 36, "work done in this step (FLOPs of products)",
                "soft", "middle")
