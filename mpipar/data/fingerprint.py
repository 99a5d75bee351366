"""The fingerprint of data, which ensures that a resumed run reads the same data as before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np

from mpipar.data.token_file import TokenFiles

EDGE = 1 << 20  # bytes at each end of a token file that `of_ends` reads


def fingerprint(arrays: Sequence, digests: Mapping[str, str]) -> dict:
    """Return length, type, and a SHA-256 of every byte of these arrays in order.

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
    return found | {"sha256": _digest(array.reshape(-1) for array in arrays)}


def of_ends(arrays: Sequence) -> dict:
    """Return the fingerprint of older checkpoints, which covers only the ends of large files."""
    return {
        "length": sum(map(len, arrays)),
        "dtype": arrays[0].dtype.name,
        "sha256": _digest(piece for array in arrays for piece in _ends(array)),
    }


def _digest(arrays) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8))
    return digest.hexdigest()


def _ends(array) -> list:
    """Return what `of_ends` reads of an array, as arrays that are small or already in memory."""
    if not isinstance(array, TokenFiles):
        return [array.reshape(-1)]
    edge, head = EDGE // array.itemsize, np.frombuffer(array.digest.encode(), np.uint8)
    if len(array) <= 2 * edge:
        return [head, array]
    files = [TokenFiles([piece], array.vocab_size) for piece in array.pieces]
    return [
        head,
        *(
            part
            for file in files
            for part in ([file[:edge], file[-edge:]] if len(file) > 2 * edge else [file])
        ),
    ]
