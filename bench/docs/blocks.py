"""Finds the generated blocks of a page, and writes them again.

A block starts with a comment that says what belongs there, and ends with `<!-- end -->`. Both stand
alone on a line. Options follow behind ` :: `:

    <!-- run: mpipar schedule naive --pp 4 :: lines 3:9 -->

A comment inside of a fenced listing is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

START = re.compile(r"<!-- (\w+): (.+) -->")
END = "<!-- end -->"
FENCE = "```"
PLAIN = {"command"}  # comments of this form that are no blocks: .ci/run finds commands by them


class PageError(Exception):
    """What is wrong with a block: the message names page, line and block."""


@dataclass(frozen=True)
class Block:
    """What one comment asks for. options: {name: value}, the value "" for a bare word."""

    kind: str
    words: str
    options: dict[str, str] = field(default_factory=dict)
    page: Path = Path("README.md")
    line: int = 0

    def problem(self, what: str) -> PageError:
        """An error that says where the block stands."""
        return PageError(f"{self.page}:{self.line}: <!-- {self.kind}: {self.words} -->: {what}")


def parse_block(head: re.Match, page: Path, line: int) -> Block:
    """The block that a comment starts."""
    words, *options = re.split(r" :: +", head[2])
    pairs = (option.strip().partition(" ") for option in options)
    return Block(head[1], words.strip(), {name: value for name, _, value in pairs}, page, line)


def update(page: Path, text: str, write: Callable[[Block, str], str]) -> str:
    """The text of a page with the body of each block written anew. Raises PageError.

    write: a block and its present body -> its body.
    """
    found, block, body, fenced = [], None, [], False
    for number, line in enumerate(text.splitlines(), 1):
        if block is not None:
            if line == END:
                found += [*write(block, "\n".join(body)).splitlines(), END]
                block, body = None, []
            elif START.fullmatch(line):
                raise block.problem(f"no {END} before line {number}")
            else:
                body.append(line)
            continue
        head = None if fenced else START.fullmatch(line)
        if line.startswith(FENCE):
            fenced = not fenced
        if head and head[1] not in PLAIN:
            block = parse_block(head, page, number)
        found.append(line)
    if block is not None:
        raise block.problem(f"no {END}")
    return "\n".join(found) + "\n"


def blocks_of(page: Path, text: str) -> list[Block]:
    """All blocks of a page, in order."""
    found: list[Block] = []

    def note(block: Block, body: str) -> str:
        found.append(block)
        return body

    update(page, text, note)
    return found


def part(block: Block, lines: list[str]) -> list[str]:
    """The lines that `lines A:B`, `from REGEX` and `to REGEX` choose; `...` where some are left
    out.
    """
    options = block.options
    first, last = 0, len(lines)
    if "lines" in options:
        low, _, high = options["lines"].partition(":")
        first, last = int(low or 1) - 1, int(high or last)
        if not 0 <= first < last <= len(lines):
            raise block.problem(f"lines {options['lines']} of {len(lines)}")
    if "from" in options:
        first = find_line(block, lines, options["from"], 0)
    if "to" in options:
        last = find_line(block, lines, options["to"], first) + 1
    return ["..."] * (first > 0) + lines[first:last] + ["..."] * (last < len(lines))


def find_line(block: Block, lines: list[str], pattern: str, start: int) -> int:
    """The index of the first line from `start` on that matches. Raises PageError if none does."""
    for index in range(start, len(lines)):
        if re.search(pattern, lines[index]):
            return index
    raise block.problem(f"no line matches {pattern!r} in\n" + "\n".join(lines))
