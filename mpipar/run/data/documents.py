"""Documents of text files, as parts that are small enough to tokenize.

A document is a file, what a separator delimits in it, or the `text` of a line of JSON. A document
of more than 2 * LONGEST characters is cut at line ends, so that it is never held in memory as a
whole. The ids of its parts are those of the whole document for every tokenizer that does not merge
text across line ends, such as those of GPT-2 and Llama 3.
"""

import codecs
import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from mpipar.errors import DataError
from mpipar.run.files.bounded import (
    JSON_LINES,
    open_regular,
    parse_json,
    problems_as,
    recognized,
)

LONGEST = 1 << 20  # characters of a part that is cut off; what remains has at least as many
BLOCK = 1 << 20  # bytes read at a time
MOST_LINE = 1 << 26  # bytes of a line of JSON; what is longer is not JSON
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")  # not beside white space, which could join its token
HEAD = 1 << 16  # characters at the start of a document that decide whether it is held out
HELD_OUT = 10  # one part in ten is held out
KEY = "text"
ARRAY = re.compile(rb'(\xef\xbb\xbf)?\s*\[\s*\{\s*"')
BEGINS_WITH_TEXT = re.compile(rb'\{[ \t]*"text"[ \t]*:')


def is_json_lines(path: Path) -> bool:
    """Return whether a file of text holds a JSON object on each line, by its name or first lines.

    ValueError names a file that is not text, such as an archive.
    """
    with open_regular(path) as file:
        head = file.read(HEAD).removeprefix(codecs.BOM_UTF8)
    kind = recognized(head, os.path.getsize(path) or 1)  # an empty one is a text, too
    # A page is text if its name says what it is.
    if kind not in (None, JSON_LINES) and path.suffix not in (".html", ".htm"):
        raise ValueError(f"is {kind}")
    return (
        path.suffix.lower() in (".jsonl", ".ndjson")
        or kind == JSON_LINES
        or bool(BEGINS_WITH_TEXT.match(head))
    )


def read_documents(
    path: Path, separator: str | None, seen: Counter, progress=lambda _: None
) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether a document ends with it) of a file; no text is empty.

    seen: counts the separators. progress(bytes): called for each block. Raises DataError for a file
    that is not text, and for a line of JSON without a text.
    """
    with problems_as(DataError, str(path)), open_regular(path) as file:
        if ARRAY.match(file.read(HEAD)):
            raise ValueError("is a JSON array; write its objects one on each line, as JSON lines")
        file.seek(0)
        if is_json_lines(path):
            found = _of_json(file, progress)
        else:
            pieces = text_pieces(iter(lambda: file.read(BLOCK), b""), progress)
            found = _split(pieces, separator, seen)
        yield from (one for one in found if one[0])


def text_pieces(blocks: Iterable[bytes], progress=lambda _: None) -> Iterator[str]:
    """Yield the text of bytes, piece by piece, without a byte order mark.

    progress: see `read_documents`. ValueError names the first byte that is not text. A zero byte is
    valid UTF-8, but no text has one, and nearly every file of numbers does.
    """
    decoder, begin = codecs.getincrementaldecoder("utf-8")(), 0
    for block in itertools.chain(blocks, [b""]):
        zero, kept = block.find(b"\0"), len(decoder.getstate()[0])  # bytes of a split character
        try:
            text = decoder.decode(block if zero < 0 else block[:zero], final=not block)
        except UnicodeDecodeError as error:
            place = begin - kept + error.start
            raise ValueError(f"is not UTF-8 text: byte {place:,} cannot be decoded") from None
        yield text if begin else text.removeprefix("\ufeff")
        if zero >= 0:
            raise ValueError(f"is not text: byte {begin + zero:,} is zero")
        begin += len(block)
        progress(len(block))


def _of_json(file, progress) -> Iterator[tuple[str, bool]]:
    """Yield the text of each line of JSON that is not blank; each is a document."""
    for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), 1):
        with problems_as(ValueError, f"line {number:,}"):
            text = "".join(text_pieces([line], progress))
            value = parse_json(text) if text.strip() else {KEY: ""}
            found = value.get(KEY) if isinstance(value, dict) else None
            if not isinstance(found, str):
                raise ValueError(f'must be an object with a text named "{KEY}"')
        yield found, True


def _split(
    pieces: Iterable[str], separator: str | None, seen: Counter
) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether a document ends with it); a separator may span pieces."""
    rest = ""
    for piece in pieces:
        *documents, rest = (rest + piece).split(separator) if separator else [rest + piece]
        seen[separator] += len(documents)
        yield from ((text, True) for text in documents)
        while len(rest) > 2 * LONGEST:  # what remains may begin a separator
            ends = (found.end() for found in LINE_END.finditer(rest, LONGEST // 2, LONGEST))
            stop = max(ends, default=LONGEST)
            yield rest[:stop], False
            rest = rest[stop:]
    yield rest, True


def is_held_out(text: str) -> bool:
    """Return whether a document is held out: one in ten, the same in every run.

    The hash of its beginning decides, so equal documents are never on both sides.
    """
    digest = hashlib.sha256(text[:HEAD].encode()).digest()
    return int.from_bytes(digest[:8], "big") < 2**64 // HELD_OUT
