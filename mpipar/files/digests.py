"""SHA-256 of whole files. What was found is kept, so that a file is not read twice for it.

It is kept in the user's cache folder by host, device, inode, size and both times of the file: a
write changes one of them. A file whose time is only just past is not kept, because a further write
could have the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from typing import BinaryIO

from mpipar.errors import DataError
from mpipar.files.bounded import problems_as, read_json
from mpipar.files.cache import cache_folder
from mpipar.files.replace import replace_file

FOLDER = "digests"  # in the cache folder
BLOCK = 1 << 24  # bytes that are read at once
SETTLED = 2_000_000_000  # ns: no disk's clock is coarser


def state_of(file: BinaryIO) -> str:
    """Return which file this is, and in which state: no other file of this host has the same text.
    """
    found = os.fstat(file.fileno())
    return " ".join(map(str, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns,
                              found.st_ctime_ns)))


def digest_of(file: BinaryIO, where: str) -> str:
    """SHA-256 of all bytes of an open file, in hexadecimal digits.

    where: begins the DataError if it cannot be read, or is written to meanwhile.
    """
    if found := kept(file):
        return found["sha256"]
    state, digest, done = state_of(file), hashlib.sha256(), 0
    with problems_as(DataError, where):
        while block := os.pread(file.fileno(), BLOCK, done):
            digest.update(block)
            done += len(block)
        if state_of(file) != state:
            raise ValueError("was written to while it was read")
    keep(file, state, {"sha256": digest.hexdigest()})
    return digest.hexdigest()


def kept(file: BinaryIO) -> dict:
    """Return what `keep` has kept of the file as it is now; empty if it has kept nothing."""
    path = _path(file)
    if path is None or not path.exists():
        return {}
    with contextlib.suppress(DataError):
        found = read_json(path)
        if isinstance(found, dict) and found.get("file") == _name(state_of(file)) and len(
                str(found.get("sha256"))) == 64:
            return found
    return {}


def keep(file: BinaryIO, state: str, found: dict) -> None:
    """Keep facts about a file that was in this state, if it still is, and no write is recent."""
    path, status = _path(file), os.fstat(file.fileno())
    age = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns)
    if path is None or age < SETTLED or state_of(file) != state:
        return
    with contextlib.suppress(OSError):  # another process may write the same at this moment
        replace_file(path, [json.dumps({"file": _name(state)} | found).encode()], sync=False)


def _path(file: BinaryIO):
    """Where facts about a file are kept, or None."""
    folder, status = cache_folder(FOLDER), os.fstat(file.fileno())
    return folder and folder / f"{status.st_dev}-{status.st_ino}.json"


def _name(state: str) -> str:
    return f"{os.uname().nodename} {state}"
