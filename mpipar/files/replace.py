"""Writes files whole or not at all: under other names, which are then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path


def replace_file(path: Path, pieces: Iterable, *, sync: bool = True) -> None:
    """Write the pieces one behind the other; readers see the whole new file or the old one.

    pieces: bytes, or what has their buffer, such as contiguous arrays. sync: whether the file is on
    the disk when this returns. Raises OSError, and leaves the old file as it was.
    """
    with replaced_files(path.parent, sync=sync) as create:
        create(path.name).writelines(pieces)


@contextmanager
def replaced_files(folder: Path, *, gone: Iterable[str] = (), sync: bool = True):
    """Yield a function that opens a new file; all get their names together, when the block ends.

    They get them in the order in which they were opened. gone: names of files that are removed
    just before. If the block fails, or a file cannot be written, the old files stay as they were.
    sync: see `replace_file`. Raises OSError.
    """
    files = {}
    try:
        with ExitStack() as stack:
            def create(name: str):
                files[name] = stack.enter_context(open(folder / f"{name}.partial", "wb"))
                return files[name]

            yield create
            for file in files.values() if sync else ():
                file.flush()
                os.fsync(file.fileno())
        for name in gone:
            (folder / name).unlink(missing_ok=True)
        for name in files:
            os.replace(folder / f"{name}.partial", folder / name)
    except BaseException:
        for name in files:
            (folder / f"{name}.partial").unlink(missing_ok=True)
        raise
