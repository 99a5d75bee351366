"""Writes a file whole or not at all: under another name, which is then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def replace_file(path: Path, pieces: Iterable, *, sync: bool = True) -> None:
    """Write the pieces one behind the other; readers see the whole new file or the old one.

    pieces: bytes, or what has their buffer, such as contiguous arrays. sync: whether the file is on
    the disk when this returns. Raises OSError, and leaves the old file as it was.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.writelines(pieces)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
