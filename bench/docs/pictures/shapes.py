"""Steps on shapes for the pictures: what a rank of any layout sends and holds, without numbers."""

from __future__ import annotations

from functools import partial

from mpipar import cli
from mpipar.comm.grid import AXES
from mpipar.commands.explain import of_named_axes
from mpipar.commands.memory_limit import num_ranks
from mpipar.commands.resolve import resolve
from mpipar.config.reading import read
from mpipar.errors import UsageError
from mpipar.plan.predict import Prediction, predict

MOST = 16  # ranks in a picture
SMALL = ("--layers", "1", "--num-microbatches", "1", "--batch-size", "4")
parser = partial(cli.command_parser, "explain")


def config_of(words: list[str]):
    """The resolved config of the flags of `mpipar explain`. Raises UsageError."""
    return resolve(*of_named_axes(read(parser().parse_args(words), [])))[0]


def all_ranks(config) -> list[Prediction]:
    """The step of each rank. Raises UsageError if a picture has no room for them."""
    size = num_ranks(config.grid)
    if size > MOST:
        raise UsageError(f"{size} ranks: a picture has room for {MOST}")
    return [predict(config, rank) for rank in range(size)]


def layout_words(config) -> str:
    """As in `dp 2 x pp 2`."""
    sizes = {axis: getattr(config.grid, axis) for axis in AXES}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"
