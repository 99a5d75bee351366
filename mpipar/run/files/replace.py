"""Writes files as a whole or not at all: under temporary names, which are then renamed."""

from __future__ import annotations

import errno
import glob
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mpipar.run.files import no_links


def replace_file(path, pieces: Iterable, *, sync: bool = True, root=None) -> None:
    """Write the pieces one after the other; readers see either the whole new file or the old one.

    pieces: bytes, or objects with a buffer, such as contiguous arrays. sync: whether the file is on
    disk when this returns. root: the run folder to which the path is relative, see
    `mpipar.run.files.no_links`. Raises OSError, and leaves the old file unchanged.
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
    files, folder = {}, no_links.folder(root, inside, make=True)
    with ExitStack() as at_end:
        with ExitStack() as stack:

            def create(name: str):
                partial = f"{name}.partial"
                no_links.remove(folder, partial)  # left by a killed process, or planted
                at_end.callback(no_links.remove, folder, partial)  # unless all have been renamed
                files[name] = stack.enter_context(no_links.create(folder, partial))
                return files[name]

            yield create
            for file in files.values() if sync else ():
                file.flush()
                os.fsync(file.fileno())
        for name in gone:
            no_links.remove(folder, name)
        for name in files:
            os.replace(folder / f"{name}.partial", folder / name)
        at_end.pop_all()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder, which gets its name at the end of the block; it is removed if that fails.

    What a killed process of this host left of the same folder is removed, too. Raises OSError, also
    if something of that name exists already.
    """
    for old in path.parent.glob(f"{glob.escape(path.name)}.partial-*"):
        if os.path.exists("/proc/self") and not os.path.exists(
            f"/proc/{old.name.rpartition('-')[2]}"
        ):
            shutil.rmtree(old, ignore_errors=True)
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "exists already")
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def set_aside(path: Path) -> Path | None:
    """Rename a file or folder to the first free name of `path.aside-1` and so on, if it exists."""
    if not os.path.lexists(path):
        return None
    others = (path.with_name(f"{path.name}.aside-{number}") for number in itertools.count(1))
    return path.rename(next(other for other in others if not os.path.lexists(other)))
