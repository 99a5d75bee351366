"""Data sources of the pictures: steps on shapes, a picture's arguments, and result files.

A watched step shows what a rank of any layout holds, and when it sends.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from bench import results
from bench.training import take_step
from mpipar import ops as ops_module
from mpipar.comm.grid import AXES
from mpipar.comm.record import Recorder
from mpipar.config.flags import Parser, count
from mpipar.errors import DataError


def layout_words(config) -> str:
    """Return a layout in words, as in `dp 2 x pp 2`."""
    sizes = {axis: getattr(config.grid, axis) for axis in AXES}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


class Look(NamedTuple):
    """FLOPs so far, the pass that has just ended or "", live bytes by label, calls posted."""

    flops: int
    name: str
    live: dict[str, int]
    posted: int


class Watching(Recorder):
    """A recorder that takes a snapshot at each change of the FLOPs done, and at the end of each
    pass.
    """

    def __init__(self, config):
        super().__init__(capacity=1 << 20)
        self.ops, self.seen = ops_module.shapes_for(config.run, self), []
        count = self.ops._count

        def count_and_look(flops: int) -> None:
            count(flops)
            self.look()

        self.ops._count = count_and_look

    def look(self, name: str = "") -> None:
        """Record what is alive now."""
        self.seen.append(Look(sum(self.ops.flops.values()), name, self.ops.live, len(self.entries)))

    def span(self, kind: str, start, stage: int = -1, mb: int = -1, end=None) -> None:
        """Record what is alive after a pass."""
        super().span(kind, start, stage, mb, end)
        self.look(f"{kind}{mb}" if mb >= 0 else kind)


def watch(config, world_rank: int) -> Watching:
    """Run a step of one rank on shapes, watched."""
    recorder = Watching(config)
    worker = take_step(config, world_rank, recorder, recorder.ops)
    recorder.look("end")
    del worker  # until here, what it holds was alive
    return recorder


def arguments(kind: str, words: list[str], **forms) -> argparse.Namespace:
    """Return these words by name: a tuple is a positional choice, a number a flag's default."""
    parser = Parser(prog=kind)
    for name, form in forms.items():
        if isinstance(form, tuple):
            parser.add_argument(name, choices=form)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=count, default=form)
    return parser.parse_args(words)


def load(root: Path, words: list[str], bench: str) -> tuple[dict, str]:
    """Read the result file that the words name; return it and where it was measured.

    Raises DataError if another benchmark made it.
    """
    if len(words) != 1:
        raise DataError(f"name one result file of {bench}")
    found = results.read(root / words[0], bench)
    machine = found["machine"]
    return found, f"Measured {machine['date']} on {machine['cores']} cores: {machine['cpu']}."


def load_trace(root: Path, words: list[str]) -> tuple[dict, str]:
    """Return the trace in a file of `docs.build measure`, and where it was measured. Raises
    DataError.
    """
    found, measured = load(root, words, "docs.build measure")
    if "trace" not in found:
        raise DataError(f"{words[0]}: none of its commands has traced a run; use train --trace")
    return found["trace"], measured
