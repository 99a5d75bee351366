"""Places of the sources in a text, named by function.

A line number is wrong after the next change above it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from bench.results import ROOT

LINE = re.compile(r"(mpipar/[\w/]+\.py):(\d+)")
NAMED = re.compile(r"(mpipar/[\w/]+\.py)(?::([\w.]+))?")
GAP = re.compile(" {2,}")


def functions_of(path: Path) -> list[tuple[str, int, int]]:
    """Return (name, first, last line) of each function of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (node.name, node.lineno, node.end_lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]


def by_function(text: str, root: Path = ROOT) -> str:
    """Return the text with file:function for each file:line; columns after it stay aligned."""
    return "\n\n".join(
        "\n".join(_named_block(block.split("\n"), root)) for block in text.split("\n\n")
    )


def _named_block(lines: list[str], root: Path) -> list[str]:
    """Return the lines of a table or paragraph, with functions for line numbers."""

    def function(found: re.Match) -> str:
        return f"{found[1]}:{function_at(root / found[1], int(found[2]))}"

    named = [LINE.sub(function, one) for one in lines]
    changed = [number for number, one in enumerate(lines) if named[number] != one]
    if not changed:
        return lines
    grown = {number: len(named[number]) - len(lines[number]) for number in changed}
    grown = {changed[0] - 1: 0} | grown  # and the head of the table
    widest = max(grown.values())
    for number, more in grown.items():
        if number >= 0:
            named[number] = GAP.sub(
                lambda gap, pad=widest - more: gap[0] + " " * pad, named[number], count=1
            )
    return named


def function_at(path: Path, line: int) -> str:
    """Return the name of the function that contains a line of a file. Raises LookupError."""
    found = [
        (last - first, name) for name, first, last in functions_of(path) if first <= line <= last
    ]
    if not found:
        raise LookupError(f"{path}:{line}: is in no function")
    return min(found)[1]


def unknown_places(text: str, root: Path = ROOT) -> list[str]:
    """Return each file of mpipar, or function in it, that a text names but that does not exist."""
    found = []
    for name, function in NAMED.findall(text):
        path = root / name
        if not path.is_file():
            found.append(name)
        elif function and function not in [one for one, _, _ in functions_of(path)]:
            found.append(f"{name}:{function}")
    return found
