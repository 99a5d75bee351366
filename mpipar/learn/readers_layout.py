"""Exercises on runs that cannot start: the answer is a layout, judged by predicting its ranks."""

from __future__ import annotations

import math
import shlex
from functools import partial
from typing import NamedTuple

from mpipar.comm.grid import AXES, Grid
from mpipar.config.flags import Parser, add_flags, parsed
from mpipar.config.reading import over, read
from mpipar.config.resolve import resolve
from mpipar.console.tables import nbytes
from mpipar.errors import UsageError
from mpipar.files.text import counted
from mpipar.learn.exercise import Asked, Exercise, Verdict
from mpipar.pipeline.combinations import RULES
from mpipar.plan.predict import predict

GB = 10**9
MODEL = {  # of 30 billion parameters
    "layers": 48,
    "d_model": 7168,
    "heads": 56,
    "seq_len": 2048,
    "vocab_size": 32000,
    "dtype": "float16",
    "bucket_bytes": 1 << 28,
}
TAKEN = {
    "dp",
    "pp",
    "cp",
    "tp",
    "sequence_parallel",
    "schedule",
    "chunks",
    "zero",
    "zero_grads",
    "zero_keep",
    "recompute",
}


class Case(NamedTuple):
    """A run that its layout makes impossible. memory: of a device, in GB. wrong: its layout."""

    devices: int
    memory: int
    wrong: str


CASES = {"15b": Case(32, 24, "pp=4,tp=2,dp=4"), "15c": Case(8, 80, "pp=4,dp=2")}
TEXT = (
    "A model of 30 billion parameters trains in float16 with AdamW on {devices} devices of"
    " {memory} GB. It has 48 blocks, width 7168, 56 heads, rows of 2048 tokens, 32,000 words."
    " Each replica runs 2 * pp microbatches of one row. The layout {wrong} does not fit."
    " Type a layout of {devices} ranks that does, and further flags if it needs them, all in"
    " quotes."
)


def exercises() -> list[Exercise]:
    """Return one exercise per case."""
    return [
        Exercise(number, TEXT.format(**case._asdict()), "'LAYOUT FLAGS'", partial(judge, case))
        for number, case in CASES.items()
    ]


def judge(case: Case, asked: Asked) -> Verdict:
    """Return the verdict on the layout of one case."""
    config = config_of(case, asked.words)
    limit = case.memory * GB
    found = {place: predict(config, place).peak_total for place in fullest(config)}
    place = max(found, key=found.get)
    right = found[place] <= limit
    return Verdict(
        right,
        [
            (
                f"the fullest rank, {place}, needs {found[place] / GB:.1f} GB"
                f" ({nbytes(found[place])}); a device has {case.memory} GB"
                f" -> {'it fits' if right else 'WRONG, it cannot start'}"
            ),
            (
                "why: weights, gradients, master weights and moments are 18 bytes for each of 30e9"
                " parameters, 540 GB. tp and pp divide them, and dp does not. The stash of"
                " activations is partly divided by tp, and fully with sequence parallelism"
            ),
        ],
    )


def config_of(case: Case, words: tuple[str, ...]):
    """Return the complete Config of an answer; UsageError lists all that is wrong with it."""
    try:
        typed = [part for word in words for part in shlex.split(word)]
    except ValueError as error:
        raise UsageError(f"the answer cannot be read: {error}") from None
    if not typed:
        raise UsageError("the answer has no layout: type one in quotes, such as 'pp=4,tp=8'")
    if not typed[0].startswith("-"):
        typed = ["--layout", *typed]
    parser = Parser(prog="mpipar explain", add_help=False)
    add_flags(parser, TAKEN)
    reading = read(*parsed(parser, typed))
    axes = {axis: reading.given.get(axis, 1) for axis in AXES}
    size = math.prod(axes.values())
    microbatches = 2 * axes["pp"]  # enough to fill the pipeline's memory
    reading = over(
        MODEL | axes | {"num_microbatches": microbatches, "batch_size": microbatches * axes["dp"]},
        reading,
    )
    problems = list(reading.problems)
    if not problems and size != case.devices:
        problems.append(
            f"the layout has {counted(size, 'rank')}, but there are {case.devices} devices"
        )
    if problems:
        raise UsageError(problems)
    return resolve(reading.config, case.devices, rules=RULES)[0]


def fullest(config) -> list[int]:
    """Return one rank of each place in the pipeline; the others of its place keep equally much."""
    grid = Grid.of(config.grid, 0)
    return [grid.at(pp=place) for place in range(config.grid.pp)]
