"""Reads UTF-8 text of any length block by block; the first byte that is not text is reported.

A zero byte is valid UTF-8, but no text contains one, and nearly every file of numbers does.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator

BLOCK = 1 << 20  # bytes read at a time


def text_pieces(blocks: Iterable[bytes]) -> Iterator[str]:
    """Yield the text of bytes, piece by piece, without a byte order mark.

    ValueError names the first byte that is not text.
    """
    decoder, begin = codecs.getincrementaldecoder("utf-8")(), 0
    for block in blocks:
        zero = block.find(b"\0")
        text = _decoded(decoder, block if zero < 0 else block[:zero], begin)
        yield text if begin else text.removeprefix("\ufeff")
        if zero >= 0:
            raise ValueError(f"is not text: byte {begin + zero:,} is zero")
        begin += len(block)
    yield _decoded(decoder, b"", begin, final=True)


def _decoded(decoder, block: bytes, begin: int, final: bool = False) -> str:
    """Return the text that this block completes. begin: its place in the file."""
    begin -= len(decoder.getstate()[0])  # bytes of a character that began in the last block
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8 text: byte {begin + error.start:,} cannot be decoded"
        ) from None


def blocks_of(file, progress: Callable[[int], object]) -> Iterator[bytes]:
    """Yield the blocks of an open file. progress(bytes): called for each."""
    while block := file.read(BLOCK):
        progress(len(block))
        yield block
