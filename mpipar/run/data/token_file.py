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
MOST_IDS = 1 << 32
MOST_VOCABULARY = 1 << 24  # the largest known vocabulary has about 260,000 ids


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
        self.dtype = np.result_type(*(piece.dtype for piece in pieces))

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
        nothing = self.pieces[0]._replace(last=self.pieces[0].first)
        return TokenFiles(found or [nothing], self.vocab_size, self.digest)

    def __array__(self, dtype=None, copy=None):
        """Return the tokens. Raises DataError if a file ends too early or an id is too large."""
        found = [_read(piece, self.vocab_size) for piece in self.pieces]
        tokens = found[0] if len(found) == 1 else np.concatenate(found)
        return tokens if dtype is None else tokens.astype(dtype)

    def __iter__(self):
        return iter(np.asarray(self))

    def check(self, digests: Sequence[str] = ()) -> None:
        """Read everything once, block by block; raise DataError as any read does.

        The pieces must be whole files. A file that was read before and has not changed since is
        not read again.
        digests: the SHA-256 that each file must have; without them nothing is compared.
        """
        wrong = []
        for piece, due in itertools.zip_longest(self.pieces, digests):
            # For a damaged file the digest should be reported, not an id that was never written.
            found = _whole(piece, self.vocab_size if due is None else MOST_IDS)
            if due is not None and found != due:
                wrong.append(
                    f"--data {piece.file.name}: has other tokens than were written:"
                    f" SHA-256 {found[:16]}..., not {due[:16]}..."
                )
        if wrong:
            raise DataError(wrong)


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


def _whole(piece: Piece, vocab_size: int) -> str:
    """Return the SHA-256 of a piece's whole file, all of whose ids are below the size."""
    file, known = piece.file, kept(piece.file)
    form, largest = f"{named(piece.dtype)} from byte {piece.start}", known.get("largest")
    if known.get("tokens") == form and type(largest) is int and largest < vocab_size:
        return known["sha256"]
    state, largest = state_of(file), 0
    digest = hashlib.sha256(os.pread(file.fileno(), piece.start, 0))
    for first in range(piece.first, piece.last, BLOCK):
        tokens = _read(piece._replace(first=first, last=min(first + BLOCK, piece.last)), vocab_size)
        digest.update(tokens.data)
        largest = max(largest, int(tokens.max()))
    keep(file, state, {"sha256": digest.hexdigest(), "tokens": form, "largest": largest})
    return digest.hexdigest()


def _read(piece: Piece, vocab_size: int) -> np.ndarray:
    """Return the tokens of a piece."""
    tokens, done = np.empty(piece.last - piece.first, piece.dtype), 0
    view, start = memoryview(tokens.view(np.uint8)), piece.start + piece.first * tokens.itemsize
    with problems_as(DataError, f"--data {piece.file.name}"):
        while read := os.preadv(piece.file.fileno(), [view[done:]], start + done):
            done += read  # one call reads at most 2 GiB
        if done < len(view):
            left = os.fstat(piece.file.fileno()).st_size - piece.start
            raise ValueError(
                f"ends at token {max(0, left // tokens.itemsize):,}, but tokens up to"
                f" {piece.last:,} were there: it was truncated while it was being read"
            )
    check_ids(piece.file.name, tokens, vocab_size, piece.first)
    return tokens


def named(dtype: np.dtype) -> str:
    """Return the name of a type of ids, with its byte order if that is not the usual one."""
    return f"{'big-endian ' if dtype.str[0] == '>' else ''}{dtype.name}"


def check_ids(name, tokens: np.ndarray, vocab_size: int, first: int = 0) -> None:
    """Raise DataError if an id is outside the vocabulary. first: the position of these tokens."""
    largest = int(tokens.max(initial=0))
    if largest < vocab_size:
        return
    at = int(np.argmax(tokens >= vocab_size))
    cures = [f"type --vocab-size {largest + 1} or more"] * (largest < MOST_VOCABULARY)
    if tokens.dtype != np.uint8:
        size = "" if tokens.itemsize < 4 else "; ids above 65,535 have 32 or 64 bits"
        cures.append(f"is it a file of {named(tokens.dtype)} ids?{size}")
    raise DataError(
        f"--data: {name}: token {int(tokens[at])} at position {first + at:,} is outside the"
        f" vocabulary of {vocab_size:,}; {', or '.join(cures)}"
    )
