"""Writes new files that are hashed while they are written and synced to disk before returning."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np

from mpipar.run.files import no_links

BLOCK_BYTES = 16 * 2**20  # a block of rows: the most that one message or one write carries
# safetensors' names of the types that are written
DTYPES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16"}


def safetensors_head(tensors) -> bytes:
    """Return the bytes of a safetensors file before its numbers.

    tensors: (name, dtype, shape) in the order in which their numbers follow, without gaps.
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPES[dtype.name],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_new(path: Path, chunks) -> tuple[int, str]:
    """Write a file that must not exist yet; return (bytes, SHA-256) of its intended content.

    path: of a file in a checkpoint folder in a run's `checkpoints`; none of the three may be a
    link. chunks: bytes and arrays. Each is hashed in memory before it is written, so that a disk
    that writes something else is detected. The file is on disk when this returns. Raises OSError.

    The kernel starts writing a block once it is told that its pages are no longer needed, so the
    disk writes one block while the next one is hashed.
    """
    digest, size, told = hashlib.sha256(), 0, 0
    run_folder = path.parents[2]
    file = no_links.opened(run_folder, str(path.relative_to(run_folder)), no_links.NEW)
    try:
        for chunk in chunks:
            data = memoryview(
                np.ascontiguousarray(chunk)  # a transposed view has other bytes
                if isinstance(chunk, np.ndarray)
                else chunk
            ).cast("B")
            digest.update(data)
            size += len(data)
            while data:
                data = data[os.write(file, data) :]
            if size - told >= BLOCK_BYTES and hasattr(os, "posix_fadvise"):  # not on every system
                os.posix_fadvise(file, told, size - told, os.POSIX_FADV_DONTNEED)
                told = size
        os.fsync(file)
    finally:
        os.close(file)
    return size, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk; its files have their own fsync."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)
