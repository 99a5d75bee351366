"""SHA-256 of whole files; results are cached, so that a file is not read twice for its digest.

The user's cache folder stores them by host, device, inode, size and both times of the file, of
which a write changes at least one. A file that was modified just now is not cached, because another
write could leave the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import BinaryIO

from mpipar.cache import cache_folder
from mpipar.errors import DataError
from mpipar.run.files.bounded import problems_as, read_json
from mpipar.run.files.no_links import replace_file

FOLDER = "digests"  # in the cache folder
BLOCK = 1 << 24  # bytes read at a time
SETTLED = 2_000_000_000  # ns: no file system's clock is coarser


def state_of(file: BinaryIO) -> str:
    """Return text that identifies a file and its state."""
    found = os.fstat(file.fileno())
    facts = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return " ".join(map(str, (os.uname().nodename, *facts)))


def digest_of(file: BinaryIO, where: str) -> str:
    """Return the SHA-256 of all bytes of an open file, in hexadecimal.

    where: the beginning of the DataError if it cannot be read, or changes while it is read.
    """
    if found := kept(file):
        return found["sha256"]
    state, digest, done = state_of(file), hashlib.sha256(), 0
    with problems_as(DataError, where):
        while block := os.pread(file.fileno(), BLOCK, done):
            digest.update(block)
            done += len(block)
        if state_of(file) != state:
            raise ValueError("was written to while it was being read")
    keep(file, state, {"sha256": digest.hexdigest()})
    return digest.hexdigest()


def kept(file: BinaryIO) -> dict:
    """Return what `keep` has stored about the file in its present state, or {}."""
    path, found = _path(file), None
    with contextlib.suppress(DataError):
        found = path and read_json(path)
    is_same = isinstance(found, dict) and found.get("file") == state_of(file)
    return found if is_same and len(str(found.get("sha256"))) == 64 else {}


def keep(file: BinaryIO, state: str, found: dict) -> None:
    """Store facts about a file that was in this state, if it still is and no write is recent."""
    path, status = _path(file), os.fstat(file.fileno())
    age = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns)
    if path is None or age < SETTLED or state_of(file) != state:
        return
    with contextlib.suppress(OSError):  # another process may be writing the same
        replace_file(path, [json.dumps({"file": state} | found).encode()], sync=False)


def _path(file: BinaryIO) -> Path | None:
    """Return where facts about a file are stored, or None."""
    folder, status = cache_folder(FOLDER), os.fstat(file.fileno())
    return folder and folder / f"{status.st_dev}-{status.st_ino}.json"
