"""Text from outside, made harmless: for a terminal, and for a sentence about it."""

from __future__ import annotations

import re
import sys

# What moves a terminal's cursor, changes its state or turns the direction of writing. A new line
# and a tab stay.
HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
MOST_SHOWN = 80  # characters of a foreign value in a sentence


def harmless(text: str) -> str:
    """Return the text with its control characters spelled out in ASCII, so that nothing obeys them.
    """
    return HARMFUL.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Foreign text as one line: harmless, with its ends of lines and tabs spelled out, too."""
    return harmless(text).replace("\n", "\\n").replace("\t", "\\t")


def quoted(text: str) -> str:
    """Foreign text of several lines, each behind a bar: none can look like a line of the log."""
    return "\n".join(f"| {line}" for line in harmless(text).split("\n"))


def printable(text: str, file=None) -> str:
    """Harmless text, with question marks for what a file's encoding lacks; file: or sys.stdout."""
    encoding = getattr(file or sys.stdout, "encoding", None) or "utf-8"
    return harmless(text).encode(encoding, "replace").decode(encoding)


def brief(text: str, most: int = MOST_SHOWN) -> str:
    """Foreign text for a sentence: on one line, and cut if it is long."""
    return one_line(cut(text, most))


def cut(text: str, most: int) -> str:
    """Return the text, without what is behind its first `most` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def counted(count: int, word: str) -> str:
    """As in `1 rank`, `4 ranks` and `4 microbatches`."""
    ending = "es" if word.endswith(("ch", "s")) else "s"
    return f"{count} {word}{ending * (count != 1)}"


def shown(value, most: int = MOST_SHOWN) -> str:
    """Return a foreign value for a sentence: its repr, cut if it is long."""
    return brief(repr(value), most)
