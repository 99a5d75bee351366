"""The worked examples by name, and a function that runs one on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.objects import gather_objects
from mpipar.comm.recorder import Recorder
from mpipar.study.examples import products, wires
from mpipar.study.examples.board import Board, ShownComm, printed

TOLERANCE = 1e-12


class Example(NamedTuple):
    """A worked example.

    chapter: of the tour. title: what it shows. axis: of the group that its ranks form. run(case) ->
    its differences from one rank. ranks: numbers of ranks on which it runs.
    """

    chapter: int
    title: str
    axis: str
    run: Callable
    ranks: tuple[int, ...] = (2, 4)


EXAMPLES = {
    "ring": Example(
        3, "an all-reduce by hand: pieces travel round a ring, twice", "tp", wires.ring_example
    ),
    "pipeline": Example(
        4,
        "two stages and two microbatches: what is sent, forward and backward",
        "pp",
        wires.pipeline,
        (2,),
    ),
    "ffn": Example(
        6,
        "two products cut by columns and by rows: one sum forward, one backward",
        "tp",
        products.ffn,
    ),
    "attention": Example(
        7, "attention cut by heads, with one sum after it", "tp", products.attention
    ),
    "vocabulary": Example(7, "the loss when no rank holds all logits", "tp", products.vocabulary),
    "data": Example(
        8, "replicas read different rows, and sum their gradients", "dp", wires.data_example
    ),
    "context": Example(
        15,
        "one row of tokens over all ranks: keys and values travel round a ring",
        "cp",
        products.context,
    ),
    "zero": Example(
        15, "a sharded update: sums are scattered, weights are gathered", "dp", wires.zero_example
    ),
}


@dataclass(frozen=True)
class Case:
    """What an example needs: array functions, groups, and boards to write on.

    comm: the group of all ranks, whose barriers are shown. alone: the group of this rank. silent:
    the board of the single rank that serves as reference, which nobody reads.
    """

    ops: object
    comm: ShownComm
    alone: object
    recorder: Recorder
    board: Board
    silent: Board


def run(name: str, world) -> tuple[list[str], float]:
    """Return (lines to print, largest difference from one rank) on world rank 0; nothing elsewhere.

    Comm: the barriers of the example, one gather.
    """
    example = EXAMPLES[name]
    ops, recorder, board = ops_module.make("cpu", "float64"), Recorder(), Board()
    grid = Grid(world.rank, {example.axis: world.size})
    comms = Comms(grid, ops, recorder, world)
    comm = ShownComm(comms[example.axis], board)
    off = example.run(Case(ops, comm, comms.alone, recorder, board, Board()))
    facts = gather_objects(world, {"notes": board.notes, "off": max(off, default=0.0)})
    comms.close()
    if world.rank:
        return [], 0.0
    largest = max(fact["off"] for fact in facts)
    lines = [
        f"{name}: {example.title}; {world.size} ranks",
        *printed([fact["notes"] for fact in facts]),
        "",
        "no number differs from one rank's by more than 1e-12"
        if largest <= TOLERANCE
        else f"largest difference from one rank: {largest:.0e}, which is a defect of mpipar",
    ]
    return lines, largest
