"""Steps on shapes for the pictures: what a rank of any layout sends and holds, without numbers."""

from __future__ import annotations

from functools import partial

from mpipar import cli
from mpipar.comm.grid import AXES
from mpipar.commands.explain import of_named_axes
from mpipar.commands.resolve import resolve

SMALL = ("--layers", "1", "--num-microbatches", "1", "--batch-size", "4")
context_of = partial(cli.context_of, None, "explain")


def config_of(words: list[str]):
    """The resolved config of the flags of `mpipar explain`. Raises UsageError."""
    return resolve(*of_named_axes(context_of(words).reading))[0]


def layout_words(config) -> str:
    """As in `dp 2 x pp 2`."""
    sizes = {axis: getattr(config.grid, axis) for axis in AXES}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"
