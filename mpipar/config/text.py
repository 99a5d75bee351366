"""Escapes foreign text, for a terminal and for messages that quote it."""

import re
import sys

# What moves a terminal's cursor, changes its state or the direction of writing; newline and tab are
# allowed.
HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
MOST_SHOWN = 80  # characters of a foreign value in a message


def harmless(text: str) -> str:
    """Return the text with control characters escaped in ASCII, so that no terminal obeys them."""
    return HARMFUL.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return foreign text as one line: harmless, with newlines and tabs escaped too."""
    return harmless(text).replace("\n", "\\n").replace("\t", "\\t")


def quoted(text: str) -> str:
    """Return foreign lines, each after a bar, so that none can pass for a line of the log."""
    return "\n".join(f"| {line}" for line in harmless(text).split("\n"))


def printable(text: str, file=None) -> str:
    """Return harmless text, with ? for what the file's (or sys.stdout's) encoding lacks."""
    encoding = getattr(file or sys.stdout, "encoding", None) or "utf-8"
    return harmless(text).encode(encoding, "replace").decode(encoding)


def brief(text: str, most: int = MOST_SHOWN) -> str:
    """Return foreign text for a message: on one line, and cut if it is long."""
    return one_line(cut(text, most))


def cut(text: str, most: int) -> str:
    """Return the text without what follows its first `most` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def counted(count: int, word: str) -> str:
    """Return a count with its noun, as in `1 rank`, `4 ranks` and `4 microbatches`."""
    ending = "es" if word.endswith(("ch", "s")) else "s"
    return f"{count} {word}{ending * (count != 1)}"


def shown(value, most: int = MOST_SHOWN) -> str:
    """Return a foreign value for a message: its repr, cut if it is long."""
    return brief(repr(value), most)
