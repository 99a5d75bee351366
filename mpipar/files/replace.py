"""Writes files as a whole or not at all: under temporary names, which are then renamed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mpipar.files import no_links


def replace_file(path, pieces: Iterable, *, sync: bool = True, root=None) -> None:
    """Write the pieces one after the other; readers see either the whole new file or the old one.

    pieces: bytes, or objects with a buffer, such as contiguous arrays. sync: whether the file is on
    disk when this returns. root: the run folder to which the path is relative, see
    `mpipar.files.no_links`. Raises OSError, and leaves the old file unchanged.
    """
    path = Path(path)
    with replaced_files(root or path.parent, path.parent if root else "", sync=sync) as create:
        create(path.name).writelines(pieces)


@contextmanager
def replaced_files(root, inside="", *, gone: Iterable[str] = (), sync: bool = True):
    """Yield a function that opens a new file; at the end of the block all get their names together.

    They are in root/inside, which is created if necessary, and are renamed in the order in which
    they were opened. gone: names of files that are removed just before. If the block fails, or a
    file cannot be written, the old files stay unchanged. sync: see `replace_file`. Raises OSError.
    """
    with no_links.folder(root, inside, make=True) as folder:
        yield from _replaced(folder, gone, sync)


def _replaced(folder: int, gone: Iterable[str], sync: bool):
    """Do the same in an open folder."""
    files = {}

    def remove(name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    try:
        with ExitStack() as stack:
            def create(name: str):
                remove(f"{name}.partial")  # left by a killed process, or planted
                descriptor = os.open(f"{name}.partial", no_links.NEW, 0o666, dir_fd=folder)
                files[name] = stack.enter_context(open(descriptor, "wb"))
                return files[name]

            yield create
            for file in files.values() if sync else ():
                file.flush()
                os.fsync(file.fileno())
        for name in gone:
            remove(name)
        for name in files:
            os.replace(f"{name}.partial", name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        for name in files:
            remove(f"{name}.partial")
        raise


def set_aside(path: Path) -> Path | None:
    """Rename a file or folder to the first free name of `path.aside-1` and so on, if it exists."""
    if not os.path.lexists(path):
        return None
    for number in itertools.count(1):
        other = path.with_name(f"{path.name}.aside-{number}")
        if not os.path.lexists(other):
            return path.rename(other)
    raise AssertionError("some number is free")
