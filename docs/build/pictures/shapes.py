"""Sources of the pictures: steps on shapes, the words behind a picture's kind, and result files.

A step that is watched says what a rank of any layout holds, and when it sends.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from bench.training import take_step
from mpipar import ops as ops_module
from mpipar.comm.grid import AXES
from mpipar.comm.record import Recorder
from mpipar.config.flags import Parser, count
from mpipar.errors import DataError


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


def arguments(kind: str, words: list[str], **forms) -> argparse.Namespace:
    """These words by name: a tuple is a choice by place, a number the default of a flag."""
    parser = Parser(prog=kind)
    for name, form in forms.items():
        if isinstance(form, tuple):
            parser.add_argument(name, choices=form)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=count, default=form)
    return parser.parse_args(words)


def load(root: Path, words: list[str], bench: str) -> tuple[dict, str]:
    """The result file that the words name, and where it was measured. Raises DataError if another
    benchmark made it.
    """
    if len(words) != 1:
        raise DataError(f"name one result file of {bench}")
    found = json.loads((root / words[0]).read_text())
    if not found["bench"].startswith(bench):
        raise DataError(f"{words[0]}: is of {found['bench']}, not of {bench}")
    machine = found["machine"]
    return found, f"Measured {machine['date']} on {machine['cores']} cores: {machine['cpu']}."


def load_trace(root: Path, words: list[str]) -> tuple[dict, str]:
    """The trace in a file of `bench.docs measure`, and where it was measured. Raises DataError."""
    found, measured = load(root, words, "bench.docs measure")
    if "trace" not in found:
        raise DataError(f"{words[0]}: none of its commands has traced a run; use train --trace")
    return found["trace"], measured
