"""Documents of text files, as parts that are small enough to tokenize.

A document is a file, what a separator delimits in it, or the `text` of a line of JSON. A document
of more than LONGEST characters is cut at line ends, so that it is never held in memory as a whole.
The ids of its parts are those of the whole document for every tokenizer that does not merge text
across line ends, such as those of GPT-2 and Llama 3.
"""

import codecs
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from mpipar.errors import DataError
from mpipar.run.files.bounded import open_regular, parse_json, problems_as
from mpipar.run.files.recognize import BYTE_ORDER_MARK, JSON_LINES, recognize

LONGEST = 1 << 20  # characters of a part
BLOCK = 1 << 20  # bytes read at a time
MOST_LINE = 1 << 26  # bytes of a line of JSON
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")  # not beside white space, which could join its token
HEAD = 1 << 16  # characters at the start of a document that decide whether it is held out
HELD_OUT = 10  # one part in ten is held out
WEB_PAGES = (".html", ".htm")  # read as text, as their names say what they are
KEY = "text"
ARRAY = re.compile(rb'\s*\[\s*\{\s*"')
BEGINS_WITH_TEXT = re.compile(rb'\{[ \t]*"text"[ \t]*:')


def check_kind(path: Path) -> None:
    """Raise ValueError that names a file which is not text, such as an archive."""
    kind = recognize(path)
    if kind not in (None, "empty", BYTE_ORDER_MARK, JSON_LINES) and path.suffix not in WEB_PAGES:
        raise ValueError(f"is {kind}")
    if ARRAY.match(_head(path)):
        raise ValueError("is a JSON array; write its objects one on each line, as JSON lines")


def is_json_lines(path: Path) -> bool:
    """Return whether a file holds a JSON object on each line, by its name or its first line."""
    known = path.suffix.lower() in (".jsonl", ".ndjson") or recognize(path) == JSON_LINES
    return known or bool(BEGINS_WITH_TEXT.match(_head(path)))


def _head(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(99).removeprefix(b"\xef\xbb\xbf")


def read_documents(
    path: Path, separator: str | None = None, progress=lambda _: None, seen: Counter | None = None
) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether a document ends with it) of a file; no document is empty.

    progress(bytes): called for each block. seen: counts the separators. Raises DataError for a file
    that is not text, and for a line of JSON without a text.
    """
    seen = Counter() if seen is None else seen
    with problems_as(DataError, str(path)), open_regular(path) as file:
        check_kind(path)
        if is_json_lines(path):
            yield from ((text, True) for text in _of_json(file, progress))
            return
        begun = False
        for text, ends in _split(text_pieces(_blocks(file, progress)), separator, seen):
            if text or (begun and ends):
                yield text, ends
            begun = bool(text or begun) and not ends


def _blocks(file, progress) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        progress(len(block))
        yield block


def text_pieces(blocks: Iterable[bytes]) -> Iterator[str]:
    """Yield the text of bytes, piece by piece, without a byte order mark.

    ValueError names the first byte that is not text. A zero byte is valid UTF-8, but no text has
    one, and nearly every file of numbers does.
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


def _of_json(file, progress) -> Iterator[str]:
    """Yield the text of each line of JSON that is not blank and whose text is not empty."""
    for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), 1):
        progress(len(line))
        with problems_as(ValueError, f"line {number:,}"):
            if len(line) == MOST_LINE:
                raise ValueError(f"has {MOST_LINE:,} bytes or more")
            text = "".join(text_pieces([line]))
            value = parse_json(text, huge=True) if text.strip() else {KEY: ""}
            found = value.get(KEY) if isinstance(value, dict) else None
            if not isinstance(found, str):
                raise ValueError(f'must be an object with a text named "{KEY}"')
        if found:
            yield found


def _split(
    pieces: Iterable[str], separator: str | None, seen: Counter
) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether a document ends with it); a separator may span pieces."""
    rest, kept = "", len(separator or "")  # the last characters may begin a separator
    for piece in pieces:
        *documents, rest = (rest + piece).split(separator) if separator else [rest + piece]
        seen[separator] += len(documents)
        for text in documents:
            last = yield from _cut(text, LONGEST)
            yield last, True
        rest = yield from _cut(rest, LONGEST + kept)
    rest = yield from _cut(rest, LONGEST)
    yield rest, True


def _cut(text: str, most: int) -> Generator[tuple[str, bool], None, str]:
    """Yield parts of a document until at most so many characters are left; return these."""
    while len(text) > most:
        cuts = (found.end() for found in LINE_END.finditer(text, LONGEST // 2, LONGEST))
        stop = max(cuts, default=LONGEST)
        yield text[:stop], False
        text = text[stop:]
    return text


def is_held_out(text: str) -> bool:
    """Return whether a document is held out: one in ten, the same in every run.

    The hash of its beginning decides, so equal documents are never on both sides.
    """
    digest = hashlib.sha256(text[:HEAD].encode()).digest()
    return int.from_bytes(digest[:8], "big") < 2**64 // HELD_OUT
