"""Finds the generated blocks of a page, and rewrites them.

A block starts with a comment that says what belongs there, and ends with `<!-- end -->`, each alone
on its line. Options follow after ` :: `:

    <!-- run: mpipar schedule naive --pp 4 :: from ^time -->

A comment inside a fenced listing is plain text, and so is a `command` comment, which .ci/run reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

END = "<!-- end -->"
START = r"^<!-- (?!command:)(\w+): ([^\n]+) -->\n"
PIECE = re.compile(rf"^```.*?^```$|{START}(?:(.*?)^{END}$)?", re.MULTILINE | re.DOTALL)
NEXT = re.compile(START, re.MULTILINE)


class PageError(Exception):
    """A block that cannot be written: the message names page, line and block."""


@dataclass(frozen=True)
class Block:
    """What one comment asks for. options: {name: value}, with the value "" for a bare word. body:
    the block's current text.
    """

    kind: str
    words: str
    options: dict[str, str]
    page: Path
    line: int = 0
    body: str = ""

    def problem(self, what: str) -> PageError:
        """Return an error that names the block's page and line."""
        return PageError(f"{self.page}:{self.line}: <!-- {self.kind}: {self.words} -->: {what}")

    def file(self, root: Path, name: str) -> Path:
        """Return a file that the block names, below `root`. Raises PageError."""
        if not (root / name).is_file():
            raise self.problem(f"no file {name}")
        return root / name

    def part(self, lines: list[str]) -> list[str]:
        """Return the lines that `from REGEX` and `to REGEX` select, with `...` for the rest."""
        first, last = 0, len(lines)
        if "from" in self.options:
            first = self._find(lines, self.options["from"], 0)
        if "to" in self.options:
            last = self._find(lines, self.options["to"], first) + 1
        return ["..."] * (first > 0) + lines[first:last] + ["..."] * (last < len(lines))

    def _find(self, lines: list[str], pattern: str, start: int) -> int:
        """Return the index of the first matching line from `start`. Raises PageError."""
        for index, line in enumerate(lines[start:], start):
            if re.search(pattern, line):
                return index
        raise self.problem(f"no line matches {pattern!r} in\n" + "\n".join(lines))


def block_of(found: re.Match[str], page: Path) -> Block:
    """Return the block of a match. Raises PageError if it has no end of its own."""
    words, *options = re.split(r" :: +", found[2])
    pairs = (option.strip().partition(" ") for option in options)
    text, body = found.string, found[3]
    block = Block(
        found[1],
        words.strip(),
        {name: value for name, _, value in pairs},
        page,
        text.count("\n", 0, found.start()) + 1,
        body or "",
    )
    other = NEXT.search(text, found.end(2), len(text) if body is None else found.end())
    if body is None or other:
        where = f" before line {text.count(chr(10), 0, other.start()) + 1}" if other else ""
        raise block.problem(f"no {END}{where}")
    return block


def blocks_of(page: Path, text: str) -> Iterator[Block]:
    """Yield all blocks of a page, in order. Raises PageError."""
    return (block_of(found, page) for found in PIECE.finditer(text) if found[1])


def update(page: Path, text: str, write: Callable[[Block], str]) -> str:
    """Return the text of a page with the body of each block rewritten. Raises PageError."""

    def written(found: re.Match[str]) -> str:
        if not found[1]:
            return found[0]
        head = found[0].partition("\n")[0]
        return "\n".join([head, *write(block_of(found, page)).splitlines(), END])

    return PIECE.sub(written, text)
