"""Reads UTF-8 text of any length block by block; the first byte that is not text is reported.

A zero byte is valid UTF-8, but no text contains one, and nearly every file of numbers does.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Iterable, Iterator

BLOCK = 1 << 20  # bytes read at a time


def text_pieces(blocks: Iterable[bytes]) -> Iterator[str]:
    """Yield the text of bytes, piece by piece, without a byte order mark.

    ValueError names the first byte that is not text.
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


def blocks_of(file, progress: Callable[[int], object]) -> Iterator[bytes]:
    """Yield the blocks of an open file. progress(bytes): called for each."""
    while block := file.read(BLOCK):
        progress(len(block))
        yield block
