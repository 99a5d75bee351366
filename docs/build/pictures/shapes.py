"""Watches steps on shapes for the pictures: what a rank of any layout holds, and when it sends."""

from __future__ import annotations

from typing import NamedTuple

from bench.shapes import take_step
from mpipar import ops as ops_module
from mpipar.comm.grid import AXES
from mpipar.comm.record import Recorder


def layout_words(config) -> str:
    """As in `dp 2 x pp 2`."""
    sizes = {axis: getattr(config.grid, axis) for axis in AXES}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


class Look(NamedTuple):
    """FLOPs so far, the pass that has just ended or "", live bytes by label, calls posted."""

    flops: int
    name: str
    live: dict[str, int]
    posted: int


class Watching(Recorder):
    """A recorder that looks at each change of the FLOPs done, and at the end of each pass."""

    def __init__(self, config):
        super().__init__(capacity=1 << 20)
        self.ops, self.seen = ops_module.shapes_for(config.run, self), []
        count = self.ops._count

        def count_and_look(flops: int) -> None:
            count(flops)
            self.look()

        self.ops._count = count_and_look

    def look(self, name: str = "") -> None:
        """Note what is alive now."""
        self.seen.append(Look(
            sum(self.ops.flops.values()), name, self.ops.live, len(self.entries)))

    def span(self, kind: str, start, stage: int = -1, mb: int = -1, end=None) -> None:
        """Note what is alive behind a pass."""
        super().span(kind, start, stage, mb, end)
        self.look(f"{kind}{mb}" if mb >= 0 else kind)


def watch(config, world_rank: int) -> Watching:
    """A step of one rank on shapes, watched."""
    recorder = Watching(config)
    worker = take_step(config, world_rank, recorder, recorder.ops)
    recorder.look("end")
    del worker  # until here, what it holds was alive
    return recorder
