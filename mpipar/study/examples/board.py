"""Collects what the ranks of an example write down, and formats it for world rank 0.

Every rank notes titles and arrays in its own order. If all ranks note the same titles, their arrays
are shown side by side; otherwise the ranks are shown one after the other.
"""

from __future__ import annotations

import sys

import numpy as np

from mpipar.comm.record import source_line, wire_bytes
from mpipar.run.console.tables import table

GAP = "    "  # between the arrays of two ranks


class Board:
    """The notes of one rank: [title, rows of numbers]."""

    def __init__(self):
        self.notes: list[list] = []

    def note(self, title: str, x) -> None:
        """Write an array down as it is now: a matrix, or a row. Axes of length 1 are left out."""
        rows = np.asarray(x, dtype=float)
        rows = rows.squeeze() if rows.ndim > 2 else rows
        rows = rows.reshape(-1, rows.shape[-1] if rows.ndim else 1)
        self.notes.append([title, rows.tolist()])

    def say(self, title: str) -> None:
        """Write a line without an array."""
        self.notes.append([title, []])


class ShownComm:
    """A `Comm` that writes each barrier down: what a rank brings, and what it gets.

    Everything else is passed on to the `Comm`.
    """

    def __init__(self, comm, board: Board):
        self.comm, self.board = comm, board

    def __getattr__(self, name: str):
        return getattr(self.comm, name)

    def _shown(self, operation: str, x, name: str, payload: int, *more):
        frame = sys._getframe(2)
        sent = wire_bytes(operation, payload, self.comm.size)
        self.board.note(f"before the {name} barrier", x)
        self.board.say(
            f"--- barrier: {operation} {name}, {payload} bytes; each rank sends {sent}"
            f" ({source_line(frame.f_code.co_filename, frame.f_lineno)})"
        )
        y = getattr(self.comm, operation)(x, name, *more)
        self.board.note("after it", y)
        return y

    def all_reduce(self, x, name: str, op: str = "sum"):
        return self._shown("all_reduce", x, name, x.nbytes, op)

    def all_gather(self, x, name: str):
        return self._shown("all_gather", x, name, x.nbytes * self.comm.size)

    def reduce_scatter(self, x, name: str):
        return self._shown("reduce_scatter", x, name, x.nbytes)

    def isend(self, x, peer: int, tag: int, name: str):
        self.board.note(f"sends {name}: {x.nbytes} bytes", x)
        return self.comm.isend(x, peer, tag, name)

    def irecv(self, x, peer: int, tag: int, name: str):
        return Arriving(self.comm.irecv(x, peer, tag, name), name, self.board)


class Arriving:
    """A posted receive that is written down when it has arrived."""

    def __init__(self, pending, name: str, board: Board):
        self.pending, self.name, self.board = pending, name, board

    def test(self) -> bool:
        return self.pending.test()

    def wait(self):
        x = self.pending.wait()
        self.board.note(f"gets {self.name}", x)
        return x


def number(value: float) -> str:
    """Return a number with at most three decimal places."""
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def matrix(rows: list[list[float]]) -> list[str]:
    """Return the lines of a matrix, its columns right-aligned."""
    return table([tuple(map(number, row)) for row in rows], left=0).splitlines()


def beside(parts: list[tuple[str, list[str]]]) -> list[str]:
    """Return the blocks of lines beside each other, each under its heading."""
    height = max(len(lines) for _, lines in parts)
    columns = []
    for heading, lines in parts:
        column = [heading, *lines, *[""] * (height - len(lines))]
        width = max(map(len, column))
        columns.append([line.ljust(width) for line in column])
    return [GAP.join(row).rstrip() for row in zip(*columns, strict=True)]


def printed(by_rank: list[list]) -> list[str]:
    """Return the lines of all ranks' notes, in the order of the ranks."""
    titles = [[title for title, _ in notes] for notes in by_rank]
    if any(one != titles[0] for one in titles):
        return [
            line
            for index, notes in enumerate(by_rank)
            for line in ["", f"rank {index}:", *one_rank(notes)]
        ]
    lines = []
    for position, title in enumerate(titles[0]):
        arrays = [notes[position][1] for notes in by_rank]
        lines += ["", title]
        if not arrays[0]:
            continue
        parts = [(f"rank {index}", matrix(one)) for index, one in enumerate(arrays)]
        alike = all(one == arrays[0] for one in arrays)
        lines += indented(beside([("every rank", parts[0][1])] if alike else parts))
    return lines


def one_rank(notes: list) -> list[str]:
    """Return the lines of one rank's notes."""
    return [
        line
        for title, rows in notes
        for line in [f"  {title}", *indented(indented(matrix(rows) if rows else []))]
    ]


def indented(lines: list[str]) -> list[str]:
    """Return the lines, indented by two spaces."""
    return [f"  {line}" for line in lines]
