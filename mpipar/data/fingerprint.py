"""The fingerprint of data: a run that goes on must read what it read before."""

from __future__ import annotations

import hashlib

import numpy as np

from mpipar.data.token_file import TokenFiles

EDGE = 1 << 20  # bytes at each end of a token file that count; reading all of it would take long


def fingerprint(arrays) -> dict:
    """Length, type and SHA-256 of these arrays in order; of large token files their ends alone.

    A prepared folder also gives the digest of its description, which covers all of its files.
    """
    digest = hashlib.sha256()
    for array in arrays:
        if isinstance(array, TokenFiles):
            digest.update(array.digest.encode())
        for piece in _pieces(array):
            digest.update(np.ascontiguousarray(piece).view(np.uint8))
    return {"length": sum(map(len, arrays)), "dtype": arrays[0].dtype.name,
            "sha256": digest.hexdigest()}


def _pieces(array) -> list:
    """What counts of an array, as arrays that are small or in memory already."""
    edge = EDGE // array.itemsize
    if not isinstance(array, TokenFiles):
        return [array.reshape(-1)]
    if len(array) <= 2 * edge:
        return [array]
    files = [TokenFiles([piece], array.vocab_size) for piece in array.pieces]
    return [part for file in files
            for part in ([file[:edge], file[-edge:]] if len(file) > 2 * edge else [file])]
