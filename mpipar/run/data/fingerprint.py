"""The fingerprint of data, which ensures that a resumed run reads the same data as before."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np

from mpipar.run.data.token_file import TokenFiles


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


def _digest(arrays) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8))
    return digest.hexdigest()
