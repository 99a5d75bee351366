"""Tokens of an open .bin file, read when they are used: the file may be larger than memory.

The file may change while a run reads it. A mapped file would then kill the process (SIGBUS), or
hand ids to the loss that no table has a row for. So each read asks the system for its bytes, and
checks that they are there and that every id is below the vocabulary's size.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from mpipar.errors import DataError

BLOCK = 1 << 24  # tokens that are checked at once


@dataclass
class TokenFile:
    """Tokens [first, last) of a file; a slice is another TokenFile, and NumPy reads it.

    start: byte of the file's first token.
    """

    file: BinaryIO
    start: int
    first: int
    last: int
    vocab_size: int

    dtype = np.dtype("<u2")
    itemsize = dtype.itemsize

    def __len__(self):
        return self.last - self.first

    def __getitem__(self, part: slice) -> TokenFile:
        first, last, step = part.indices(len(self))
        assert step == 1, part
        return TokenFile(self.file, self.start, self.first + first,
                         self.first + max(first, last), self.vocab_size)

    def __array__(self, dtype=None, copy=None):
        """The tokens. Raises DataError where the file ends too early or has an id too large."""
        tokens, done = np.empty(len(self), self.dtype), 0
        view, start = memoryview(tokens).cast("B"), self.start + self.first * self.itemsize
        try:
            while read := os.preadv(self.file.fileno(), [view[done:]], start + done):
                done += read  # one call reads at most 2 GiB
        except OSError as error:
            raise DataError(f"--data {self.file.name}: {error.strerror}") from None
        if done < len(view):
            left = os.fstat(self.file.fileno()).st_size - self.start
            end = max(0, left // self.itemsize)
            raise DataError(f"--data {self.file.name}: ends at token {end:,}, but tokens up to"
                            f" {self.last:,} were there: it was cut while it was read")
        if done and tokens.max() >= self.vocab_size:
            raise DataError("--data: " + outside(
                self.file.name, tokens, self.first, self.vocab_size))
        return tokens if dtype is None else tokens.astype(dtype)

    def __iter__(self):
        return iter(np.asarray(self))

    def check(self) -> None:
        """Read all of it once, block by block; raises DataError like any read."""
        for first in range(0, len(self), BLOCK):
            np.asarray(self[first:first + BLOCK])


def outside(name, tokens: np.ndarray, first: int, vocab_size: int) -> str:
    """What to say of tokens that hold an id without a row in the table. first: their position."""
    at = int(np.argmax(tokens >= vocab_size))
    return (f"{name}: token {int(tokens[at])} at position {first + at:,} is outside the vocabulary"
            f" of {vocab_size:,}; type --vocab-size {int(tokens.max()) + 1} or more")
