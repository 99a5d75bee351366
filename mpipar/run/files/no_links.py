"""Opens and replaces files of a run without following links: the folder may be someone else's.

No part of a path below the run folder, the *root*, may be a link. Links on the way to it are
followed, since the user typed it. A new root is for this user alone, so nobody else changes what
was looked at. Files are written as a whole or not at all: under temporary names, which are then
renamed.
"""

from __future__ import annotations

import errno
import glob
import itertools
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

# O_NONBLOCK has no effect on a regular file; it opens a pipe without waiting for its other end.
SAFELY = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


def make_root(root) -> None:
    """Create a root, for this user alone, and the folders above it, if it does not exist."""
    Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)


def folder(root, inside: str | os.PathLike = "", *, make: bool = False) -> Path:
    """Return the folder root/inside; OSError if a part of it below the root is a link.

    make: create what is missing below the root.
    """
    path = Path(root)
    for name in Path(inside).parts:
        path /= name
        if make:
            path.mkdir(exist_ok=True)
        if path.is_symlink():
            raise _strange(name)
    return path


def opened(root, name: str, flags: int) -> int:
    """Return the descriptor of the regular file root/name; the flags are those of os.open.

    root: None for a file of the user's: links are followed.
    """
    path, safely = (name, 0) if root is None else (_inside(root, name), os.O_NOFOLLOW)
    last = root and os.path.basename(name)
    try:
        descriptor = os.open(path, flags | safely | SAFELY, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _strange(last) from None
        named = f"{last}: " if flags & os.O_CREAT else ""  # a reader says the whole path
        raise type(error)(error.errno, f"{named}{error.strerror}") from None
    found = os.fstat(descriptor)
    alone = found.st_nlink == 1 or not flags & (os.O_WRONLY | os.O_RDWR)
    if stat.S_ISREG(found.st_mode) and alone:  # what has more names would change with it
        return descriptor
    os.close(descriptor)
    raise _strange(last)


def create(root, name: str) -> BinaryIO:
    """Return a new binary file; FileExistsError if anything has that name."""
    return open(opened(root, name, NEW), "wb")


def append(root, name: str) -> BinaryIO:
    """Return the file for appending bytes, unbuffered; it can also be read."""
    return open(opened(root, name, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b", buffering=0)


def remove(root, name: str) -> None:
    """Remove a file, or a link itself, if it exists."""
    _inside(root, name).unlink(missing_ok=True)


def remove_tree(root, name: str) -> None:
    """Remove a folder and all its contents, if it exists; refuse a link."""
    with suppress(FileNotFoundError):
        shutil.rmtree(_inside(root, name))


def _inside(root, name: str) -> Path:
    above, last = os.path.split(name)
    return folder(root, above) / last


def _strange(name: str | None) -> OSError:
    why = "is a link, a folder, a pipe or a device; give a regular file"
    if name:
        why = f"{name} is a link, or another kind of file than a run has; move it away"
    return PermissionError(errno.EPERM, why)


def replace_file(path, pieces: Iterable, *, sync: bool = True, root=None) -> None:
    """Write the pieces one after the other; readers see either the whole new file or the old one.

    pieces: bytes, or objects with a buffer, such as contiguous arrays. sync: whether the file is on
    disk when this returns. root: the run folder to which the path is relative. Raises OSError,
    and leaves the old file unchanged.
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
    files, place = {}, folder(root, inside, make=True)
    with ExitStack() as at_end:
        with ExitStack() as stack:

            def open_new(name: str):
                partial = f"{name}.partial"
                remove(place, partial)  # left by a killed process, or planted
                at_end.callback(remove, place, partial)  # unless it has been renamed
                files[name] = stack.enter_context(create(place, partial))
                return files[name]

            yield open_new
            for file in files.values() if sync else ():
                file.flush()
                os.fsync(file.fileno())
        for name in gone:
            remove(place, name)
        for name in files:
            os.replace(place / f"{name}.partial", place / name)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder, which gets its name at the end of the block; it is removed if that fails.

    What a killed process of this host left of the same folder is removed, too. Raises OSError.
    """
    for old in path.parent.glob(f"{glob.escape(path.name)}.partial-*"):
        if os.path.exists("/proc/self") and not os.path.exists(
            f"/proc/{old.name.rpartition('-')[2]}"
        ):
            shutil.rmtree(old, ignore_errors=True)
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
