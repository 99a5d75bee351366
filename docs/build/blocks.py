"""Finds the generated blocks of a page, and writes them again.

A block starts with a comment that says what belongs there, and ends with `<!-- end -->`. Both stand
alone on a line. Options follow behind ` :: `:

    <!-- run: mpipar schedule naive --pp 4 :: lines 3:9 -->

A comment inside of a fenced listing is text, and so is one of a command, which .ci/run looks for.
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
    """What is wrong with a block: the message names page, line and block."""


@dataclass(frozen=True)
class Block:
    """What one comment asks for. options: {name: value}, the value "" for a bare word. body: what
    stands there now.
    """

    kind: str
    words: str
    options: dict[str, str]
    page: Path
    line: int = 0
    body: str = ""

    def problem(self, what: str) -> PageError:
        """An error that says where the block stands."""
        return PageError(f"{self.page}:{self.line}: <!-- {self.kind}: {self.words} -->: {what}")

    def file(self, root: Path, name: str) -> Path:
        """A file that it names. Raises PageError."""
        if not (root / name).is_file():
            raise self.problem(f"no file {name}")
        return root / name

    def part(self, lines: list[str]) -> list[str]:
        """The lines that `lines A:B`, `from REGEX` and `to REGEX` choose; `...` for the others."""
        first, last = 0, len(lines)
        if "lines" in self.options:
            low, _, high = self.options["lines"].partition(":")
            first, last = int(low or 1) - 1, int(high or last)
            if not 0 <= first < last <= len(lines):
                raise self.problem(f"lines {self.options['lines']} of {len(lines)}")
        if "from" in self.options:
            first = self._find(lines, self.options["from"], 0)
        if "to" in self.options:
            last = self._find(lines, self.options["to"], first) + 1
        return ["..."] * (first > 0) + lines[first:last] + ["..."] * (last < len(lines))

    def _find(self, lines: list[str], pattern: str, start: int) -> int:
        """The index of the first line from `start` on that matches. Raises PageError."""
        for index, line in enumerate(lines[start:], start):
            if re.search(pattern, line):
                return index
        raise self.problem(f"no line matches {pattern!r} in\n" + "\n".join(lines))


def block_of(found: re.Match[str], page: Path) -> Block:
    """The block that was found. Raises PageError if it has no end of its own."""
    words, *options = re.split(r" :: +", found[2])
    pairs = (option.strip().partition(" ") for option in options)
    text, body = found.string, found[3]
    block = Block(found[1], words.strip(), {name: value for name, _, value in pairs}, page,
                  text.count("\n", 0, found.start()) + 1, body or "")
    other = NEXT.search(text, found.end(2), len(text) if body is None else found.end())
    if body is None or other:
        where = f" before line {text.count(chr(10), 0, other.start()) + 1}" if other else ""
        raise block.problem(f"no {END}{where}")
    return block


def blocks_of(page: Path, text: str) -> Iterator[Block]:
    """All blocks of a page, in order. Raises PageError."""
    return (block_of(found, page) for found in PIECE.finditer(text) if found[1])


def update(page: Path, text: str, write: Callable[[Block], str]) -> str:
    """The text of a page with the body of each block written anew. Raises PageError."""
    def written(found: re.Match[str]) -> str:
        if not found[1]:
            return found[0]
        head = found[0].partition("\n")[0]
        return "\n".join([head, *write(block_of(found, page)).splitlines(), END])

    return PIECE.sub(written, text)
