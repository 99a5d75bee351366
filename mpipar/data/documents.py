"""Documents of text files, as parts that are small enough to tokenize.

A document is a file, or what a separator delimits in it. Up to LONGEST characters, it is one part;
a longer one is cut at line ends, so that it is never held in memory as a whole. The ids of its
parts are those of the whole document for every tokenizer that does not merge text across line ends,
such as those of GPT-2 and Llama 3.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from mpipar.errors import DataError
from mpipar.files.bounded import open_regular, problems_as
from mpipar.files.utf8 import blocks_of, text_pieces

LONGEST = 1 << 20  # characters that a tokenizer gets at a time
BATCH = 4 * LONGEST  # characters of several parts, for the library's threads
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")  # not beside white space, which could join its token
HEAD = 1 << 16  # characters at the start of a document that decide whether it is held out
HELD_OUT = 10  # one part in ten is held out


class End(Enum):
    """What ends with a piece of text: nothing, the part before a document's cut, or a document."""

    NOTHING = 0
    CUT = 1
    DOCUMENT = 2


@dataclass(frozen=True)
class TextPart:
    """Text of one document. end: what ends with it. head: the `head_hash` of its document."""

    text: str
    end: End
    head: int


def read_documents(
    files: Iterable[Path], separator: str | None, progress
) -> Iterator[tuple[str, End]]:
    """Yield (piece of text, what ends with it) of all documents that are not empty, in order.

    progress(bytes): called for each block. Raises DataError for a file that is not text.
    """

    def blocks(file):
        for block in blocks_of(file):
            progress(len(block))
            yield block

    for path in files:
        with problems_as(DataError, str(path)), open_regular(path) as file:
            pieces = text_pieces(blocks(file))
            yield from _not_empty(split(pieces, separator) if separator else whole(pieces))


def whole(pieces: Iterable[str]) -> Iterator[tuple[str, End]]:
    """Yield the pieces of a file that is a single document."""
    for piece in pieces:
        yield piece, End.NOTHING
    yield "", End.DOCUMENT


def split(pieces: Iterable[str], separator: str) -> Iterator[tuple[str, End]]:
    """Yield the pieces between separators; a separator may span pieces."""
    rest = ""
    for piece in pieces:
        *documents, rest = (rest + piece).split(separator)
        for text in documents:
            yield text, End.DOCUMENT
        certain = max(0, len(rest) - len(separator) + 1)  # after it, a separator may begin
        yield rest[:certain], End.NOTHING
        rest = rest[certain:]
    yield rest, End.DOCUMENT


def _not_empty(pieces: Iterable[tuple[str, End]]) -> Iterator[tuple[str, End]]:
    """Yield the pieces without empty documents, and without empty pieces inside documents."""
    begun = False
    for text, end in pieces:
        if text or (begun and end is not End.NOTHING):
            yield text, end
        begun = (begun or bool(text)) and end is End.NOTHING


def cut_at(pieces: Iterable[tuple[str, End]], characters: int) -> Iterator[tuple[str, End]]:
    """Yield the same pieces, with a cut after so many characters."""
    left = characters
    for text, end in pieces:
        if 0 < left <= len(text):
            yield text[:left], End.CUT
            yield text[left:], end
        else:
            yield text, end
        left -= len(text)


def parts(pieces: Iterable[tuple[str, End]], longest: int = LONGEST) -> Iterator[TextPart]:
    """Yield the parts of all documents, of at most `longest` characters; only a last one is ""."""
    text, head = "", None
    for piece, end in pieces:
        text += piece
        while len(text) > longest:
            head = head_hash(text) if head is None else head
            stop = max(
                (found.end() for found in LINE_END.finditer(text, longest // 2, longest)),
                default=longest,
            )
            yield TextPart(text[:stop], End.NOTHING, head)
            text = text[stop:]
        if end is not End.NOTHING:
            yield TextPart(text, end, head_hash(text) if head is None else head)
            text, head = "", None


def encoded_documents(
    tokenizer, pieces: Iterable[tuple[str, End]], longest: int = LONGEST
) -> Iterator[tuple[np.ndarray, TextPart]]:
    """Yield the ids of each part of all documents, in order; many parts are encoded at a time."""
    batch, characters = [], 0
    for part in parts(pieces, longest):
        batch.append(part)
        characters += len(part.text)
        if characters >= BATCH:
            yield from _of_batch(tokenizer, batch)
            batch, characters = [], 0
    yield from _of_batch(tokenizer, batch)


def _of_batch(tokenizer, batch: list[TextPart]) -> Iterator[tuple[np.ndarray, TextPart]]:
    return zip(tokenizer.encode_all([part.text for part in batch]), batch, strict=True)


def head_hash(text: str) -> int:
    """Return a number below 2^64 that depends on a document's beginning, the same in every run."""
    digest = hashlib.sha256(text[:HEAD].encode()).digest()
    return int.from_bytes(digest[:8], "big")


@dataclass(frozen=True)
class Survey:
    """The result of a first pass over all documents: their number, characters and hashes.

    smallest, largest: of the hashes.
    """

    documents: int
    characters: int
    smallest: int
    largest: int

    def is_held_out(self, head: int) -> bool:
        """Return whether a document is held out: one in ten, but at least one and not all.

        The hash of its beginning decides, so equal documents are never on both sides.
        """
        return head <= max(2**64 // HELD_OUT, self.smallest) and head < self.largest

    @property
    def cut(self) -> int | None:
        """Where a single document is cut, in characters: its last tenth is held out."""
        return self.characters - self.characters // HELD_OUT if self.documents == 1 else None


def survey(pieces: Iterable[tuple[str, End]]) -> Survey:
    """Make a first pass over all documents. Raises DataError if nothing can be held out."""
    documents = characters = 0
    smallest, largest = 2**64, -1
    for part in parts(pieces):
        characters += len(part.text)
        documents += part.end is End.DOCUMENT
        smallest, largest = min(smallest, part.head), max(largest, part.head)
    if not documents:
        raise DataError("there is no text: all files are empty; give files with text")
    if documents == 1 and characters < HELD_OUT:
        raise DataError(f"there is too little text: {characters} characters; give more")
    if smallest == largest and documents > 1:
        raise DataError(
            f"all {documents:,} documents are the same text, so none can be held out; give it once"
        )
    return Survey(documents, characters, smallest, largest)
