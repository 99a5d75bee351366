"""Text in UTF-8 of any length, read a block at a time: a file that is no text is named by its byte.

A zero byte is legal UTF-8, but no text has one. A file of numbers nearly always has.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

BLOCK = 1 << 20  # bytes that a reader takes at once


def text_pieces(blocks: Iterable[bytes]) -> Iterator[str]:
    """Yield the text of bytes, piece by piece; ValueError names the first byte that is in no text.
    """
    decoder, begin = codecs.getincrementaldecoder("utf-8")(), 0
    for block in blocks:
        zero = block.find(b"\0")
        yield _decoded(decoder, block if zero < 0 else block[:zero], begin)
        if zero >= 0:
            raise ValueError(f"is no text: byte {begin + zero:,} is zero")
        begin += len(block)
    yield _decoded(decoder, b"", begin, final=True)


def _decoded(decoder, block: bytes, begin: int, final: bool = False) -> str:
    """The text that this block completes. begin: its place in the file."""
    begin -= len(decoder.getstate()[0])  # bytes of a character that the last block began
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise ValueError(f"is no UTF-8 text: byte {begin + error.start:,} cannot be read") from None


def blocks_of(file) -> Iterator[bytes]:
    """Return the blocks of an open file."""
    return iter(lambda: file.read(BLOCK), b"")
