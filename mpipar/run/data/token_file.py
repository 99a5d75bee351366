"""Tokens of open .bin files, read when they are used, so the files may be larger than memory.

A file may change while a run reads it. If it were mapped, that would kill the process (SIGBUS) or
pass ids to the loss that have no row in the table. Each read therefore asks the system for its
bytes, and checks that they are there and that every id is below the vocabulary's size.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import BinaryIO, NamedTuple, Self

import numpy as np

from mpipar.errors import DataError
from mpipar.run.files.bounded import problems_as
from mpipar.run.files.digests import keep, kept, state_of

BLOCK = 1 << 24  # tokens checked at a time


class Piece(NamedTuple):
    """Tokens [first, last) of a file. start: byte of the file's first token. dtype: of its ids."""

    file: BinaryIO
    start: int
    first: int
    last: int
    dtype: np.dtype


class TokenFiles:
    """The tokens of several files in sequence; slices are of the same type, and NumPy reads them.

    digest: of what the files contained when they were written, or "".
    """

    def __init__(self, pieces: Sequence[Piece], vocab_size: int, digest: str = ""):
        self.pieces, self.vocab_size, self.digest = pieces, vocab_size, digest
        self.dtype = np.result_type("<u2", *(piece.dtype for piece in pieces))

    def __len__(self):
        return sum(piece.last - piece.first for piece in self.pieces)

    def __getitem__(self, part: slice) -> Self:
        first, last, step = part.indices(len(self))
        assert step == 1, part
        found, begin = [], 0
        for piece in self.pieces:
            low, high = max(first - begin, 0), min(last - begin, piece.last - piece.first)
            if low < high:
                found.append(piece._replace(first=piece.first + low, last=piece.first + high))
            begin += piece.last - piece.first
        return TokenFiles(found, self.vocab_size, self.digest)

    def __array__(self, dtype=None, copy=None):
        """Return the tokens. Raises DataError if a file ends too early or an id is too large."""
        found = [np.empty(0, self.dtype)]
        for piece in self.pieces:
            found.append(_read(piece))
            check_ids(piece.file.name, int(found[-1].max()), self.vocab_size)
        return np.concatenate(found, dtype=dtype, casting="unsafe")

    def check(self, digests: Sequence[str] = ()) -> None:
        """Read everything once, block by block; raise DataError as any read does.

        The pieces must be whole files. A file that was read before and has not changed since is
        not read again.
        digests: the SHA-256 that each file must have; without them nothing is compared.
        """
        for piece, due in itertools.zip_longest(self.pieces, digests):
            found, largest = _whole(piece)
            if due is not None and found != due:
                raise DataError(
                    f"{piece.file.name}: has other tokens than were written:"
                    f" SHA-256 {found[:16]}..., not {due[:16]}..."
                )
            check_ids(piece.file.name, largest, self.vocab_size)


def pieces_of(arrays) -> list[Piece]:
    """Return the pieces of token files among the arrays of data."""
    return [piece for array in arrays if isinstance(array, TokenFiles) for piece in array.pieces]


def fingerprint(arrays: Sequence, digests: Mapping[str, str]) -> dict:
    """Return length, type, and a SHA-256 of every byte of these arrays in order.

    By it a resumed run tells whether it reads the same data as before.

    digests: {name: SHA-256} of the token files among them. For those, the fingerprint covers their
    digests and which tokens of each file are used, and for a prepared folder also the digest of its
    description.
    """
    found = {"length": sum(map(len, arrays)), "dtype": arrays[0].dtype.name}
    if any(isinstance(array, TokenFiles) for array in arrays):
        parts = [
            [
                array.digest,
                *(
                    [digests[piece.file.name], piece.start, piece.first, piece.last]
                    for piece in array.pieces
                ),
            ]
            for array in arrays
        ]
        return found | {"files": hashlib.sha256(json.dumps(parts).encode()).hexdigest()}
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array.reshape(-1)).view(np.uint8))
    return found | {"sha256": digest.hexdigest()}


def _whole(piece: Piece) -> tuple[str, int]:
    """Return the SHA-256 of a piece's whole file, and the largest of its ids."""
    file, known = piece.file, kept(piece.file)
    form = f"{piece.dtype.name} from byte {piece.start}"
    if known.get("tokens") == form and type(known.get("largest")) is int:
        return known["sha256"], known["largest"]
    state, largest = state_of(file), 0
    digest = hashlib.sha256(os.pread(file.fileno(), piece.start, 0))
    for first in range(piece.first, piece.last, BLOCK):
        tokens = _read(piece._replace(first=first, last=min(first + BLOCK, piece.last)))
        digest.update(tokens.data)
        largest = max(largest, int(tokens.max()))
    keep(file, state, {"sha256": digest.hexdigest(), "tokens": form, "largest": largest})
    return digest.hexdigest(), largest


def _read(piece: Piece) -> np.ndarray:
    """Return the tokens of a piece."""
    tokens, done = np.empty(piece.last - piece.first, piece.dtype), 0
    view, start = memoryview(tokens.view(np.uint8)), piece.start + piece.first * tokens.itemsize
    with problems_as(DataError, piece.file.name):
        while read := os.preadv(piece.file.fileno(), [view[done:]], start + done):
            done += read  # one call reads at most 2 GiB
        if done < len(view):
            raise ValueError("ends before its last token: it was truncated while it was being read")
    return tokens


def check_ids(name, largest: int, vocab_size: int) -> None:
    """Raise DataError if the largest id of a file is outside the vocabulary."""
    if largest >= vocab_size:
        raise DataError(
            f"{name}: token {largest} is outside the vocabulary of {vocab_size:,}; type"
            f" --vocab-size {largest + 1} or more, or give ids of this vocabulary"
        )
