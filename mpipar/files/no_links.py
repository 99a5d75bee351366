"""Opens files of a run without following links: a run folder may come from someone else.

Every step from the folder, the *root*, down to a file starts from an open folder. Links on the way
to the root are followed, since the user typed it. A new root is for this user alone.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK has no effect on a regular file; it opens a pipe without waiting for its other end.
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFELY


def make_root(root) -> None:
    """Create a root, for this user alone, and the folders above it, if it does not exist."""
    Path(root).parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # what is no folder is refused when it is opened
        Path(root).mkdir(mode=0o700)


@contextmanager
def folder(root, inside: str | os.PathLike = "", *, make: bool = False) -> Iterator[int]:
    """Yield the descriptor of the folder root/inside, each part of which must be a real folder.

    make: create what is missing below the root.
    """
    descriptor = os.open(root, FOLDER)
    try:
        for name in Path(inside).parts:
            with suppress(FileExistsError):
                if make:
                    os.mkdir(name, dir_fd=descriptor)
            above, descriptor = descriptor, _open(name, FOLDER | os.O_NOFOLLOW, descriptor)
            os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def opened(root, name: str, flags: int) -> int:
    """Return the descriptor of the regular file root/name; the flags are those of os.open."""
    inside, _, last = name.rpartition("/")
    with folder(root, inside) as parent:
        return _open(last, flags | SAFELY, parent)


def create(root, name: str) -> BinaryIO:
    """Return a new binary file; FileExistsError if anything has that name."""
    return open(opened(root, name, NEW), "wb")


def append(root, name: str) -> BinaryIO:
    """Return the file for appending bytes, unbuffered; it can also be read."""
    return open(opened(root, name, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b", buffering=0)


def remove(root, name: str) -> None:
    """Remove a file, or a link itself, if it exists."""
    inside, _, last = name.rpartition("/")
    with suppress(FileNotFoundError), folder(root, inside) as parent:
        os.unlink(last, dir_fd=parent)


def remove_tree(root, name: str) -> None:
    """Remove a folder and all its contents, if it exists; refuse a link."""
    inside, _, last = name.rpartition("/")
    with suppress(FileNotFoundError), folder(root, inside) as parent:
        shutil.rmtree(last, dir_fd=parent)


def _open(name: str, flags: int, parent: int) -> int:
    """Open a file or folder; OSError if a link, a pipe or anything else has its name."""
    try:
        descriptor = os.open(name, flags, 0o666, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
            raise _strange(name) from None
        raise type(error)(error.errno, f"{name}: {error.strerror}") from None
    found = os.fstat(descriptor)
    wanted = stat.S_ISDIR if flags & os.O_DIRECTORY else stat.S_ISREG
    alone = found.st_nlink == 1 or not flags & (os.O_WRONLY | os.O_RDWR)
    if wanted(found.st_mode) and alone:  # what has more names would change with it
        return descriptor
    os.close(descriptor)
    raise _strange(name)


def _strange(name: str) -> OSError:
    why = "is a link, or another kind of file than a run has; move it away"
    return PermissionError(errno.EPERM, f"{name} {why}")
